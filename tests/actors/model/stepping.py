"""A scheduler's hand-written stand-in: builds the SchedulerOutputs of one test, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import NewRequestData, ResumedRequestData, SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import SamplingParams
from actors.core.vllm_view import sampled_token_ids
from actors.lora_config import LoraConfig
from actors.model.loaded_runner import LoadedRunner
from actors.model.model_runner import ModelRunner
from actors.model.tensor_parallel.group import TensorParallelGroup
from kv_transfer.layout import KeyOrder

NOT_YET: Final = -7
"""Stands for a token that the host does not know yet."""


def make_runner(
    directory: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    max_num_seqs: int = 16,
    lora: LoraConfig | None = None,
    attention_backend: Literal["auto", "torch", "vllm_cpu"] = "torch",
    key_order: KeyOrder = KeyOrder.PLAIN,
    group: TensorParallelGroup | None = None,
    **model_settings: object,
) -> ModelRunner:
    """Make a runner that can step, in float32 on the CPU if model_settings name nothing else.

    group: the ranks that share the model
    """
    settings = {"model": str(directory), "dtype": "float32", "device": "cpu"} | model_settings
    loaded = LoadedRunner.load(
        ModelConfig.model_validate(settings),
        CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            attention_backend=attention_backend,
            key_order=key_order.value,
        ),
        SchedulerConfig(max_num_seqs=max_num_seqs),
        ParallelConfig(num_threads=1),
        group,
    )
    if lora is not None:
        loaded.enable_lora(lora, lambda: None)
    return loaded.initialize(loaded.determine_num_blocks())


@dataclass
class Sequence:
    """One request of the test."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    row: int = -1
    is_known: bool = False
    is_preempted: bool = False
    lora_name: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class Stepper:
    """Runs sequences through a runner; every step is chosen by the test."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.sequences: dict[str, Sequence] = {}
        self.outputs: list[ModelRunnerOutput] = []
        self._free = list(range(runner.layout.num_blocks))
        self._rows = list(range(16))
        random.Random(seed).shuffle(self._free)
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def add(self, req_id: str, sequence: Sequence) -> None:
        self.sequences[req_id] = sequence

    def finish(self, req_id: str) -> list[int]:
        sequence = self.sequences.pop(req_id)
        self._free.extend(sequence.blocks)
        if sequence.row >= 0:
            self._rows.insert(0, sequence.row)
        self._finished.add(req_id)
        return sequence.output

    def preempt(self, req_id: str) -> None:
        sequence = self.sequences[req_id]
        self._free.extend(sequence.blocks)
        sequence.blocks, sequence.num_sent_blocks, sequence.num_computed = [], 0, 0
        self._rows.insert(0, sequence.row)
        sequence.row = -1
        sequence.is_preempted = True
        self._preempted.add(req_id)

    def step(self, num_tokens: dict[str, int]) -> ModelRunnerOutput:
        """Compute so many tokens of these sequences, in this order."""
        output = self.runner.execute_model(self._describe_step(num_tokens))
        for req_id, sampled in zip(output.req_ids, sampled_token_ids(output), strict=True):
            self.sequences[req_id].num_computed += num_tokens[req_id]
            self.sequences[req_id].output.extend(sampled)
        self.outputs.append(output)
        return output

    def launch(self, num_tokens: dict[str, int]) -> Callable[[], ModelRunnerOutput]:
        """Begin to compute so many tokens of these sequences; returns a function that waits for the new tokens.

        Until then a sequence that gets one has NOT_YET instead.
        """
        launched = self.runner.launch(self._describe_step(num_tokens))
        pending: dict[str, tuple[Sequence, int]] = {}
        for req_id, count in num_tokens.items():
            sequence = self.sequences[req_id]
            sequence.num_computed += count
            if sequence.num_computed == sequence.num_tokens:
                pending[req_id] = (sequence, len(sequence.output))
                sequence.output.append(NOT_YET)

        def wait() -> ModelRunnerOutput:
            output = launched.result()
            for req_id, sampled in zip(output.req_ids, sampled_token_ids(output), strict=True):
                assert len(sampled) == (req_id in pending)
                if sampled:
                    sequence, index = pending[req_id]
                    sequence.output[index] = sampled[0]
            return output

        return wait

    def _describe_step(self, num_tokens: dict[str, int]) -> SchedulerOutput:
        new: list[NewRequestData] = []
        resumed: list[ResumedRequestData] = []
        grown: list[tuple[int, int, int]] = []
        for req_id, count in num_tokens.items():
            sequence = self.sequences[req_id]
            self.allocate(sequence, sequence.num_computed + count)
            self._describe(req_id, sequence, new, resumed, grown)
        described = SchedulerOutput(
            batch=self._batch(num_tokens, grown),
            scheduled_new_reqs=new,
            scheduled_resumed_reqs=resumed,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            finished_req_ids=self._finished,
            preempted_req_ids=self._preempted,
        )
        self._finished, self._preempted = set(), set()
        return described

    def run(self, *, num_output_tokens: int, chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Step until every sequence has so many output tokens, at most chunk tokens of each in a step."""
        while unfinished := {
            req_id: min(chunk, sequence.num_tokens - sequence.num_computed)
            for req_id, sequence in self.sequences.items()
            if len(sequence.output) < num_output_tokens
        }:
            self.step(unfinished)
        return {req_id: sequence.output for req_id, sequence in self.sequences.items()}

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self.runner.layout.block_size < num_tokens:
            sequence.blocks.append(self._free.pop(0))

    def _batch(self, num_tokens: dict[str, int], grown: list[tuple[int, int, int]]) -> StepBatch:
        sequences = [self.sequences[req_id] for req_id in num_tokens]
        columns = np.array(grown, dtype=np.int64).reshape(-1, 3).T
        return StepBatch(
            req_ids=list(num_tokens),
            rows=np.array([sequence.row for sequence in sequences], dtype=np.int64),
            epochs=np.ones(len(sequences), dtype=np.int64),
            num_plain=0,
            num_new_tokens=np.array(list(num_tokens.values()), dtype=np.int64),
            num_computed_tokens=np.array([sequence.num_computed for sequence in sequences], dtype=np.int64),
            num_output_tokens=np.array([len(sequence.output) for sequence in sequences], dtype=np.int64),
            grown=columns,
        )

    def _describe(
        self,
        req_id: str,
        sequence: Sequence,
        new: list[NewRequestData],
        resumed: list[ResumedRequestData],
        grown: list[tuple[int, int, int]],
    ) -> None:
        first, sequence.num_sent_blocks = sequence.num_sent_blocks, len(sequence.blocks)
        if sequence.row < 0:
            sequence.row = self._rows.pop(0)
        if not sequence.is_known:
            sequence.is_known = True
            new.append(
                NewRequestData(
                    req_id=req_id,
                    row=sequence.row,
                    prompt_token_ids=sequence.prompt,
                    output_token_ids=list(sequence.output),
                    sampling_params=sequence.params,
                    eos_token_ids=self.runner.eos_token_ids,
                    block_ids=(list(sequence.blocks),),
                    num_computed_tokens=sequence.num_computed,
                    lora_name=sequence.lora_name,
                )
            )
        elif sequence.is_preempted:
            resumed.append(ResumedRequestData(req_id, sequence.row, sequence.num_tokens, (list(sequence.blocks),)))
            sequence.is_preempted = False
        else:
            grown += [(sequence.row, index, sequence.blocks[index]) for index in range(first, len(sequence.blocks))]
