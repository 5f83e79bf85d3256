"""The order of transfers and steps on the simulated GPU; test_simulated_gpu.py starts it in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from actors.core.requests.sampling_params import SamplingParams
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.device_kind import StreamEvent, device_module, mark_stream
from kv_transfer.sides.worker_side import WorkerSide
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.block_order import ORDER, Unordered
from tests.simulated_gpu.device import install
from tests.simulated_gpu.tensors import DeviceTensor
from tests.simulated_gpu.transport import FAULTS, SimulatedPipe

CheckpointOf = Callable[[str], Path]
DEVICE = install()
PROMPT: Final = random_prompt(40)
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def cache() -> Tensor:
    """A watched cache of eight blocks."""
    made = torch.zeros(8, 4, device=DEVICE)
    assert isinstance(made, DeviceTensor)
    ORDER.watch(made.host)
    return made


def mark() -> StreamEvent:
    event = mark_stream(DEVICE)
    assert event is not None
    return event


class TestBlocks:
    """A side stream, beside steps that write and read single blocks."""

    def test_a_block_is_read_behind_the_event_after_its_last_write(self, cache: Tensor) -> None:
        module, before = device_module(DEVICE), mark()
        cache[3].fill_(5.0)
        after = mark()
        cache.index_copy_(0, torch.tensor([6]).to(DEVICE), torch.ones(1, 4, device=DEVICE))
        side = module.Stream(DEVICE)
        with module.stream(side):
            side.wait_event(before)
            cache[2].clone()
            with pytest.raises(Unordered, match="reads blocks that are not computed"):
                cache[3].clone()
            side.wait_event(after)
            assert cache[3].clone().tolist() == [5.0] * 4
            with pytest.raises(Unordered, match="reads blocks that are not computed"):
                cache[6].clone()

    def test_a_block_is_written_behind_the_event_after_its_last_use(self, cache: Tensor) -> None:
        module, before = device_module(DEVICE), mark()
        cache[1].clone()
        after = mark()
        side, ones = module.Stream(DEVICE), torch.ones(4, device=DEVICE)
        with module.stream(side):
            side.wait_event(before)
            cache[1].clone()
            cache[0].copy_(ones)
            with pytest.raises(Unordered, match="writes blocks that are still used"):
                cache[1].copy_(ones)
            side.wait_event(after)
            cache[1].copy_(ones)


class TestLinks:
    """A data link's ends."""

    def test_a_chunk_without_its_event_is_refused_at_either_end(self, cache: Tensor) -> None:
        before = mark()
        cache[0].fill_(1.0)
        for event in (None, before):
            with pytest.raises(Unordered):
                SimulatedPipe().send([cache[0]], 1.0, event)
        assert len(FAULTS) == 2
        FAULTS.clear()


class TestEngines:
    """Whole engines, of which one forgets an event."""

    @pytest.mark.parametrize("is_left_out", [False, True])
    def test_a_chunk_that_is_sent_before_its_step_is_computed_is_noticed(
        self, is_left_out: bool, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        early = None if is_left_out else mark()

        def finish_step(side: WorkerSide, metadata: KVConnectorMetadata) -> None:
            if metadata.progress:
                side._agent.finish_step(metadata.progress, early)

        monkeypatch.setattr(WorkerSide, "finish_step", finish_step)
        hand_over(checkpoint("llama"), lambda: bool(FAULTS))
        assert ("has waited for no event" if is_left_out else "reads blocks that are not computed") in str(FAULTS[0])
        FAULTS.clear()

    def test_blocks_that_are_filled_before_other_requests_have_read_them_are_noticed(
        self, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        early = mark()

        def start_step(side: WorkerSide, metadata: KVConnectorMetadata) -> None:
            if not metadata.is_empty():
                side._agent.start_step(metadata, early)

        monkeypatch.setattr(WorkerSide, "start_step", start_step)
        hand_over(checkpoint("llama"), lambda: bool(FAULTS))
        assert "writes blocks that are still used" in str(FAULTS[0])
        FAULTS.clear()

    def test_with_their_events_nothing_is_noticed(self, checkpoint: CheckpointOf) -> None:
        directory = checkpoint("llama")
        assert hand_over(directory) == greedy_tokens(directory, tuple(PROMPT), 12)


def hand_over(directory: Path, is_done: Callable[[], bool] | None = None) -> list[int]:
    """Let a request use most of the consumer's blocks, and then hand another one over; returns the tokens so far."""
    config = engine_config(directory, block_size=8, num_blocks=12, overlap=True)
    settings = {"enforce_eager": True, "step_cost_warm_up_s": 0.0}
    config = config.model_copy(update={"model": config.model.model_copy(update=settings)})
    with EnginePair(config, config) as pair:
        pair.submit("decode", "before", random_prompt(60), GREEDY)
        pair.run()
        pair.hand_over("a", PROMPT, GREEDY)
        pair.run(is_done)
        return pair.answers["a"].token_ids
