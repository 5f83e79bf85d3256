"""Tensor-parallel ranks on the simulated GPU; test_simulated_gpu.py starts them in a process of their own."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Backend

from actors.config import ModelConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from actors.model.errors import RankLost
from actors.model.tensor_parallel.group import TensorParallelGroup
from tests.actors.model.ranks import on_each_rank
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.adapters import adapted_tokens, adapter_of, make_adapter
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.collectives import SimulatedNccl
from tests.simulated_gpu.device import install
from tests.simulated_gpu.tensors import SIMULATION

CheckpointOf = Callable[[str], Path]
DEVICE = install()
SIZE = 2
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite_swa", "nemotron")
MIXTURES = ("mixtral", "qwen3_moe")
PROMPT_LENGTHS = (1, 7, 16, 33, 40)
NUM_OUTPUT_TOKENS = 12
WAITS = {"actors/model/sampling/transfers.py:wait", "actors/model/launched_step.py:result"}
"""A rank waits for what the sampler has computed, or for a step that samples nothing, and never for another rank."""


class TestCollectives:
    """NCCL's stand-in, and what the project makes of it."""

    def test_sums_and_gathered_tensors_come_without_a_wait(self) -> None:
        def work(group: TensorParallelGroup) -> list[torch.Tensor]:
            own = torch.arange(3.0, device=DEVICE) + 10 * group.rank
            return [group.all_gather(own), group.all_reduce(own)]

        SIMULATION.take_waits()
        ranks = on_each_rank(SIZE, work, device=DEVICE)
        assert SIMULATION.take_waits() == {}
        for gathered, total in ranks:
            assert gathered.tolist() == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
            assert total.tolist() == [10.0, 12.0, 14.0]

    def test_a_result_is_not_there_before_the_call_is_waited_for(self) -> None:
        def work(group: TensorParallelGroup) -> list[list[float]]:
            tensor = torch.ones(2, device=DEVICE)
            queued = group._collectives._group.allreduce([tensor])  # type: ignore[attr-defined]  # NCCL's stand-in
            before = tensor.tolist()
            queued.wait()
            return [before, tensor.tolist()]

        for before, after in on_each_rank(SIZE, work, device=DEVICE):
            assert before != [2.0, 2.0]
            assert after == [2.0, 2.0]

    @pytest.mark.parametrize(
        ("tensor", "reason"),
        [
            (lambda rank: torch.ones(2), "no backend for tensors of the cpu"),
            (lambda rank: torch.ones(2 + rank, device=DEVICE), "ranks differ in call 1"),
            (lambda rank: torch.ones(2, device=DEVICE, dtype=(torch.float32, torch.bfloat16)[rank]), "ranks differ"),
        ],
    )
    def test_what_nccl_cannot_sum_raises(self, tensor: Callable[[int], torch.Tensor], reason: str) -> None:
        with pytest.raises(RankLost, match=reason):
            on_each_rank(SIZE, lambda group: group.all_reduce(tensor(group.rank)), device=DEVICE)

    def test_other_layouts_and_other_calls_raise(self) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            on_each_rank(SIZE, lambda group: group.all_reduce(torch.ones(4, 4, device=DEVICE).t()), device=DEVICE)
        calls = (TensorParallelGroup.all_reduce, TensorParallelGroup.all_gather)
        with pytest.raises(RankLost, match="ranks differ in call 1"):
            on_each_rank(SIZE, lambda group: calls[group.rank](group, torch.ones(2, device=DEVICE)), device=DEVICE)

    def test_a_rank_that_leaves_fails_the_others(self) -> None:
        def work(group: TensorParallelGroup) -> None:
            if group.rank == 0:
                group.all_reduce(torch.ones(2, device=DEVICE))

        with pytest.raises(RankLost, match="did not make call 1"):
            on_each_rank(SIZE, work, device=DEVICE)

    def test_torch_has_what_the_stand_in_stands_for(self) -> None:
        """A CPU build of torch lacks NCCL's class, and has the declaration of its types."""
        names = {name for name in vars(SimulatedNccl) if not name.startswith("__")} - {"Options", "_swap"}
        assert names == {"allreduce", "_allgather_base", "_set_default_timeout", "abort"}
        declared = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text())
        [nccl] = (node for node in declared.body if isinstance(node, ast.ClassDef) and node.name == "ProcessGroupNCCL")
        own = {node.name for node in nccl.body if isinstance(node, ast.FunctionDef)}
        assert names <= own | set(dir(Backend))
        assert hasattr(Backend.Options, "_timeout")


def run_ranks(
    directory: Path, sequences: Callable[[], dict[str, Sequence]], **settings: object
) -> list[dict[str, list[int]]]:
    """Return each rank's tokens: chunks of prompts beside decodes, then decodes alone.

    A step waits once on each rank: for its tokens, or for its end if it has none. settings: as of make_runner()
    """
    num_steps = []

    def work(group: TensorParallelGroup) -> dict[str, list[int]]:
        runner = make_runner(directory, group=group, **settings)  # type: ignore[arg-type]  # by keyword
        runner.warm_up()
        runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(2, 6)), 16, lambda text: None)
        assert runner.cuda_graphs == "none: the model is split over ranks, whose collectives were never captured"
        stepper = Stepper(runner)
        for name, sequence in sequences().items():
            stepper.add(name, sequence)
        # No rank steps while another one still loads, whose waits would count.
        group.all_reduce(torch.zeros(1, device=DEVICE))
        if group.rank == 0:
            SIMULATION.take_waits()
        group.all_reduce(torch.zeros(1, device=DEVICE))
        outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=17)
        num_steps.append(len(stepper.outputs))
        return outputs

    ranks = on_each_rank(SIZE, work, device=DEVICE)
    waits = SIMULATION.take_waits()
    assert set(waits) <= WAITS
    assert sum(waits.values()) == sum(num_steps)
    return ranks


def greedy_sequences() -> dict[str, Sequence]:
    return {str(length): Sequence(random_prompt(length)) for length in PROMPT_LENGTHS}


class TestSteps:
    """Whole steps of each rank."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_tokens_equal_generate_on_every_rank(self, family: str, checkpoint: CheckpointOf) -> None:
        directory = checkpoint(family)
        expected = {
            name: greedy_tokens(directory, tuple(sequence.prompt), NUM_OUTPUT_TOKENS)
            for name, sequence in greedy_sequences().items()
        }
        assert run_ranks(directory, greedy_sequences) == [expected] * SIZE

    @pytest.mark.parametrize("family", MIXTURES)
    def test_mixtures_wait_no_oftener_in_bfloat16(self, family: str, checkpoint: CheckpointOf) -> None:
        ranks = run_ranks(checkpoint(family), greedy_sequences, dtype="bfloat16")
        assert ranks[0] == ranks[1]
        assert all(len(tokens) == NUM_OUTPUT_TOKENS for tokens in ranks[0].values())

    def test_sampling_of_any_kind_gives_every_rank_the_same_tokens(self, checkpoint: CheckpointOf) -> None:
        kinds = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=1),
            SamplingParams(temperature=1.1, top_k=20, min_p=0.05, seed=2, logprobs=3),
            SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1),
            SamplingParams(temperature=0.0, logit_bias={5: 3.0}, allowed_token_ids=tuple(range(3, 90)), logprobs=1),
            SamplingParams(temperature=0.7, bad_words=((7,), (8, 9)), min_tokens=4, stop_token_ids=(11,), seed=3),
        ]
        ranks = run_ranks(
            checkpoint("llama"),
            lambda: {str(index): Sequence(random_prompt(10 + index), kind) for index, kind in enumerate(kinds)},
        )
        assert ranks[0] == ranks[1]

    def test_every_rank_adds_its_part_of_an_adapter(self, checkpoint: CheckpointOf, tmp_path: Path) -> None:
        directory = checkpoint("llama")
        adapters = {name: make_adapter(directory, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
        lora = LoraConfig(
            allowed_directories=(str(tmp_path),),
            max_lora_rank=8,
            adapters={name: str(path) for name, path in adapters.items()},
        )
        keys = {name: adapter_of(path, name).key for name, path in adapters.items()}
        prompt = random_prompt(20)
        ranks = run_ranks(
            directory,
            lambda: {name: Sequence(prompt, lora_name=keys.get(name)) for name in ("a", "b", "base")},
            lora=lora,
        )
        expected = {name: adapted_tokens(directory, path, prompt, NUM_OUTPUT_TOKENS) for name, path in adapters.items()}
        expected["base"] = greedy_tokens(directory, tuple(prompt), NUM_OUTPUT_TOKENS)
        assert ranks == [expected] * SIZE
