"""Capturing keeps its limits, and a step that is more than decoding has no graph.

Tests of actors/model/graphs/decode_graphs.py; tests/simulated_gpu/checked.py replays whole models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from actors.model.attention.batch_attention import BatchShape
from actors.model.forward import FlatForward
from actors.model.graphs.decode_graphs import CaptureLimits, DecodeGraphs
from actors.model.input_batch import StepInputs
from actors.model.sampling.prompt_logprobs import PromptParts
from actors.model.spec_decode.verification import StepDrafts

SIZES = (1, 2, 4, 8)


class Recorder:
    """Records nothing; each graph takes memory and time, and may fail."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.fails_at = -1

    def record(self, function: Callable[[], object]) -> Recorder:
        if self.num_graphs == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.num_graphs += 1
        function()
        return self

    def replay(self) -> None:
        """Do nothing."""

    def free_memory_bytes(self) -> int:
        return 1000 - 100 * self.num_graphs


class Attention:
    kv_cache = torch.zeros(4, 1, 1, 2, 16, 8)
    block_size = 16

    def decode(self, batch: object, max_seq_len: int) -> None:
        assert max_seq_len == 64


def graphs_of(recorder: Recorder, adapters: Adapters | None = None, *, fails: bool = False) -> DecodeGraphs:
    def forward(ids: torch.Tensor, positions: torch.Tensor, batch: object, indices: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("out of memory")
        return torch.zeros(len(indices), 5)

    forward.model = SimpleNamespace(dtype=torch.float32)  # type: ignore[attr-defined]  # what is read of a model
    model = cast(FlatForward, forward)
    return DecodeGraphs(model, Attention(), recorder, SIZES, max_model_len=64, vocab_size=5, adapters=adapters)  # type: ignore[arg-type]  # attends to nothing


def capture(recorder: Recorder, *, time_s: float = 100.0, memory_bytes: int = 10_000) -> tuple[DecodeGraphs, list[str]]:
    graphs, said = graphs_of(recorder), list[str]()
    graphs.capture(CaptureLimits(time_s, memory_bytes), said.append, clock=lambda: float(recorder.num_graphs))
    return graphs, said


def decoding(num_requests: int) -> StepInputs:
    ones = np.ones(num_requests, dtype=np.int64)
    shape = BatchShape(np.arange(num_requests + 1), ones, ones[:, None])
    numbers = np.arange(num_requests)
    return StepInputs(ones, ones, shape, numbers, numbers, numbers)


def test_all_sizes_are_captured_from_the_largest_on() -> None:
    graphs, said = capture(Recorder())
    assert graphs.sizes == SIZES
    assert said == [f"capturing CUDA graphs, {index} of 4 batch sizes" for index in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("limits", "sizes"), [({"time_s": 2.0}, (4, 8)), ({"memory_bytes": 250}, (2, 4, 8)), ({"time_s": 0.0}, ())]
)
def test_a_limit_ends_capturing_and_larger_graphs_serve_smaller_batches(
    limits: dict[str, float], sizes: tuple[int, ...]
) -> None:
    graphs, _ = capture(Recorder(), **limits)  # type: ignore[arg-type]  # one limit each
    assert graphs.sizes == sizes
    assert graphs.size_for(decoding(1)) == (sizes[0] if sizes else None)
    assert graphs.summary.startswith("for " if sizes else "none: the time limit is reached")


def test_a_model_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.fails_at = 1
    with caplog.at_level("INFO"):
        graphs, _ = capture(recorder)
    assert graphs.sizes == (8,)
    [record] = [record for record in caplog.records if record.message == "captured CUDA graphs"]
    assert record.__dict__["ended_because"] == "4 requests: operation not permitted when stream is capturing"
    assert re.fullmatch(r"for 8 requests, \d+ MiB, \d+\.\d s; 4 requests: operation not .*", graphs.summary)


class Adapters:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def use_slots(self, slots: torch.Tensor) -> None:
        assert slots.tolist() == [-1] * len(slots), "no row has an adapter while graphs are captured"
        self.calls.append("slots")

    def use_none(self) -> None:
        self.calls.append("none")


def test_each_size_has_a_second_graph_with_adapters_and_leaves_none_behind() -> None:
    recorder, adapters = Recorder(), Adapters()
    graphs = graphs_of(recorder, adapters)
    graphs.capture(CaptureLimits(100.0, 10_000), lambda text: None)
    assert recorder.num_graphs == 2 * len(SIZES)
    # Each graph's function runs once before it is recorded, and once while it is.
    assert adapters.calls == ["none", "none", "slots", "none", "slots", "none"] * len(SIZES)


def test_a_forward_that_fails_leaves_no_adapter_behind() -> None:
    recorder, adapters = Recorder(), Adapters()
    graphs = graphs_of(recorder, adapters, fails=True)
    graphs.capture(CaptureLimits(100.0, 10_000), lambda text: None)
    assert graphs.sizes == ()
    assert adapters.calls == ["none"]


def test_only_steps_that_decode_have_a_graph() -> None:
    graphs, _ = capture(Recorder())
    step = decoding(3)
    assert graphs.size_for(step) == 4
    assert graphs.size_for(decoding(9)) is None
    two_tokens = replace(step.shape, query_starts=np.array([0, 1, 2, 4]))
    others = [
        replace(step, shape=two_tokens, token_ids=np.ones(4, dtype=np.int64)),
        replace(step, sampled=np.arange(2)),
        replace(step, drafts=StepDrafts(np.full((3, 1), 7))),
        replace(step, embeds=torch.zeros(3, 8)),
        # The last token of a prompt looks like a decode.
        replace(step, prompts=cast(PromptParts, object())),
    ]
    assert [graphs.size_for(other) for other in others] == [None] * 5
