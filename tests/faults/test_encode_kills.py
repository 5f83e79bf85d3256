"""kill -9 and SIGSTOP in a transfer of embeddings: the answer is that of generate(), and no block is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.core.requests.sampling_params import SamplingParams
from cluster.routing.engine_connection import EngineRole
from tests.actors.test_images import Case
from tests.faults.engine_house import EngineHouse
from tests.faults.engine_process import EngineProcess
from tests.faults.fault_points import Action, Fault, Point
from tests.faults.live_engines import NUM_TOKENS, TRANSFER, LiveEngines, Question

_JOINED_TIMEOUT_S = 60.0
_TRANSFER = TRANSFER.model_copy(update={"chunk_timeout_s": 2.0})
"""The engine that receives from a stopped one outwaits this deadline."""
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class SeeingEngines(LiveEngines):
    """Engines of a model that takes images, one of which only encodes."""

    async def start_three(self) -> tuple[EngineProcess, EngineProcess, EngineProcess]:
        encode = await self.start("encode-0", EngineRole.ENCODE, transfer=_TRANSFER)
        return encode, *await self.start_pair(transfer=_TRANSFER)

    def show(self, seed: int) -> Question:
        case = Case(self.directory, "qwen2_5_vl")
        request = case.request(f"image-{next(self._house.numbers)}", (seed,), _GREEDY)
        request = replace(request, eos_token_ids=(0,), cache_salt=request.request_id)
        # Another name than in other tests: nobody has it cached.
        name = f"{request.request_id}-{seed}"
        features = tuple(replace(feature, mm_hash=name) for feature in request.mm_features)
        inputs = tuple(replace(image, mm_hash=name) for image in request.encoder_inputs)
        return Question(
            replace(request, mm_features=features, encoder_inputs=inputs), case.expected((seed,), NUM_TOKENS)
        )

    async def check_sent(self, encode: EngineProcess, others: list[EngineProcess]) -> None:
        """Embeddings come over a link again, as soon as the engines are joined again: until then they do without."""
        before = encode.count("num_sent_chunks")
        async with asyncio.timeout(_JOINED_TIMEOUT_S):
            while encode.count("num_sent_chunks") == before:
                await self.check(self.show(2))
        await self.check_whole(encode, *others)


@pytest.fixture(params=[pytest.param(False, id="tcp"), pytest.param(True, id="shared memory", marks=pytest.mark.slow)])
async def engines(
    request: pytest.FixtureRequest, house: EngineHouse, checkpoint: Callable[[str], Path]
) -> AsyncIterator[SeeingEngines]:
    async with SeeingEngines(house, checkpoint("qwen2_5_vl"), is_pool_shared=request.param) as started:
        yield started


@pytest.mark.parametrize("point", [Point.HEARING_READY, Point.INSIDE_CHUNK, Point.AFTER_CHUNK])
async def test_an_encode_engine_that_is_killed_costs_no_token(engines: SeeingEngines, point: Point) -> None:
    encode, prefill, decode = await engines.start_three()
    encode.arm(Fault(Action.KILL, point, 1))
    answer = asyncio.create_task(engines.check(engines.show(1)))
    await encode.wait_fired()
    await answer
    await engines.check_whole(prefill, decode)
    successor = await engines.restart(encode)
    await engines.check_sent(successor, [prefill, decode])


@pytest.mark.parametrize("point", [Point.SAYING_READY, Point.INSIDE_CHUNK, Point.AFTER_CHUNK])
async def test_a_prefill_engine_that_is_killed_leaves_nothing_at_the_encode_engine(
    engines: SeeingEngines, point: Point
) -> None:
    encode, prefill, decode = await engines.start_three()
    prefill.arm(Fault(Action.KILL, point, 1))
    answer = asyncio.create_task(engines.check(engines.show(1)))
    await prefill.wait_fired()
    successor = await engines.restart(prefill)
    await answer
    await engines.check_whole(encode, decode, successor)
    await engines.check_sent(encode, [decode, successor])


async def test_an_encode_engine_that_wakes_late_writes_into_no_block(engines: SeeingEngines) -> None:
    encode, prefill, decode = await engines.start_three()
    encode.arm(Fault(Action.STOP, Point.INSIDE_CHUNK, 1))
    answer = asyncio.create_task(engines.check(engines.show(1)))
    await encode.wait_fired()
    await answer
    await engines.check_whole(prefill, decode)
    encode.signal(signal.SIGCONT)
    await engines.check_whole(encode)
    await engines.check_sent(encode, [prefill, decode])
