"""One engine with drafts, and proposers that know what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.outputs.scheduler_stats import SpecDecodingStats
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model import loaded_runner
from actors.model.input_batch import TokenRows
from actors.model.loaded_runner import LoadedRunner
from actors.model.spec_decode.proposer import Proposer
from actors.worker import Worker
from tests.actors.core.builders import Clock
from tests.checkpoints import VOCAB_SIZE

EAGER = SpeculativeConfig(num_tokens=4, max_step_tokens=64, min_acceptance=0.01, prompt_lookup_min=1)
"""Drafts on whatever fails."""

ProposerMaker = Callable[[TokenRows], Proposer]


@dataclass
class KnowingProposer:
    """Drafts what follows each known prompt, or just that not."""

    tokens: TokenRows
    continuations: Mapping[tuple[int, ...], Sequence[int]]
    is_right: Callable[[], bool]

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        drafts = []
        for row, count in zip(rows.tolist(), num_wanted.tolist(), strict=True):
            known = self.tokens.token_ids[row, : self.tokens.num_tokens[row]].tolist()
            drafts.append([self._draft(known, ahead) for ahead in range(count)])
        return drafts

    def _draft(self, known: list[int], ahead: int) -> int:
        for prompt, continuation in sorted(self.continuations.items(), key=lambda item: -len(item[0])):
            num_output = len(known) - len(prompt) + ahead
            if tuple(known[: len(prompt)]) == prompt and 0 <= num_output < len(continuation):
                right = continuation[num_output]
                return right if self.is_right() else (right + 1) % VOCAB_SIZE
        return 7


def always_right(continuations: Mapping[tuple[int, ...], Sequence[int]]) -> ProposerMaker:
    return lambda tokens: KnowingProposer(tokens, continuations, lambda: True)


def always_wrong(continuations: Mapping[tuple[int, ...], Sequence[int]]) -> ProposerMaker:
    return lambda tokens: KnowingProposer(tokens, continuations, lambda: False)


def right_by_chance(continuations: Mapping[tuple[int, ...], Sequence[int]], seed: int = 0) -> ProposerMaker:
    chance = random.Random(seed)
    return lambda tokens: KnowingProposer(tokens, continuations, lambda: chance.random() < 0.7)


@contextmanager
def proposing(make: ProposerMaker | None) -> Iterator[None]:
    """Engines that are built meanwhile have this proposer instead of the one that their settings name."""
    with pytest.MonkeyPatch.context() as patch:
        if make is not None:
            patch.setattr(loaded_runner, "make_proposer", lambda config, batch, draft: make(batch.tokens))
        yield


@dataclass
class Seen:
    """The output that the client of one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: EngineCoreOutput | None = None


class SpeculatingEngine:
    """A core of one engine without links, float32 on the CPU; stepped by the test."""

    def __init__(
        self,
        checkpoint: Path,
        speculative: SpeculativeConfig | None = EAGER,
        *,
        proposer: ProposerMaker | None = None,
        num_blocks: int = 128,
        block_size: int = 8,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        overlap: bool = False,
    ) -> None:
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative=speculative,
            overlap=overlap,
        )
        cache_config = CacheConfig(block_size=block_size, num_blocks=num_blocks)
        loaded = LoadedRunner.load(
            ModelConfig(model=str(checkpoint), dtype="float32", device="cpu"),
            cache_config,
            scheduler_config,
            ParallelConfig(num_threads=1),
        )
        with proposing(proposer):
            self.runner = loaded.initialize(num_blocks)
        self.scheduler = Scheduler(scheduler_config, cache_config, num_blocks, self.runner.max_model_len, clock=Clock())
        executor = InProcessExecutor(Worker(self.runner, None), overlap=overlap)
        self.core = EngineCore(self.scheduler, executor, Clock(), hash_key=PUBLIC_KEY)

    def __enter__(self) -> SpeculatingEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.core.shutdown()

    def run(
        self,
        requests: Mapping[str, tuple[Sequence[int], SamplingParams]],
        *,
        outputs: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Seen]:
        """Submit all at once and step until all have ended. outputs: tokens that requests come with."""
        seen = {request_id: Seen(list((outputs or {}).get(request_id, ()))) for request_id in requests}
        for request_id, (prompt, params) in requests.items():
            self.core.submit(
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=list(prompt),
                    sampling_params=params,
                    output_token_ids=list(seen[request_id].token_ids),
                    eos_token_ids=self.runner.eos_token_ids,
                )
            )
        for _ in range(2000):
            result = self.core.step()
            for output in (output for client in result.outputs.values() for output in client.outputs):
                _take(seen[output.request_id], output)
            self.scheduler.check_integrity()
            if result.is_idle:
                return seen
        raise AssertionError(f"no end: {seen}")

    @property
    def stats(self) -> SpecDecodingStats:
        """The counts of drafts, and of those that were right."""
        stats = self.scheduler.make_stats().spec_decoding_stats
        assert stats is not None
        return stats


def _take(seen: Seen, output: EngineCoreOutput) -> None:
    assert output.error is None
    if output.new_token_ids:
        assert output.first_position == len(seen.token_ids), "a gap, or a token twice"
        seen.token_ids += output.new_token_ids
        seen.logprobs += output.logprobs or []
    if output.finished:
        seen.end = output
