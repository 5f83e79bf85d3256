"""Embeddings travel from an encode engine to the one that prefills, over the links that KV takes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.config import EngineConfig
from actors.core.outputs.scheduler_stats import EmbeddingStats
from actors.core.requests.request import EngineCoreRequest
from actors.engine_server import EngineServer
from actors.sessions import remote_encoding
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress
from kv_transfer.transfer_stats import TransferStats
from tests.actors.test_images import Case
from tests.engine_pair import engine_config
from tests.integration.test_shared_memory import forbid_memory_files
from tests.kv_transfer.faulty_transport import Faults
from tests.trusted import TRUST, member
from tests.vision import num_encoded_by

CheckpointOf = Callable[[str], Path]
PATIENT_S = 60.0


@pytest.fixture
def case(checkpoint: CheckpointOf) -> Case:
    return Case(checkpoint("qwen2_5_vl"), "qwen2_5_vl")


@dataclass
class Engines:
    """An engine that encodes and one that prefills and decodes, in this process, and a session with the latter."""

    encode: EngineServer
    prefill: EngineServer
    encoder: EngineAddress
    session: EngineSession
    num_fetched: dict[str, int] = field(default_factory=dict)
    """Images whose embeddings came over a link, by request."""

    async def ask(self, request: EngineCoreRequest) -> list[int]:
        """A request's tokens, if it is to be encoded elsewhere."""
        stream = self.session.submit(replace(request, encoder=self.encoder))
        outputs = [output async for output in stream]
        timings = outputs[-1].timings
        assert timings is not None
        self.num_fetched[request.request_id] = timings.num_fetched_images
        return [token for output in outputs for token in output.new_token_ids]

    async def assert_whole(self) -> None:
        """Nothing is left of any transfer at either end, in the scheduler or in the pool's memory."""
        for server in (self.encode, self.prefill):
            async with asyncio.timeout(PATIENT_S):
                while await read(server, lambda core: core.scheduler.has_requests()):
                    pass
            await read(server, lambda core: core.scheduler.check_integrity())
            pool = await read(server, lambda core: core.scheduler.kv_cache_manager.block_pool)
            assert pool.num_free_blocks == pool.num_blocks
        assert not self.prefill._encoding

    async def embeddings(self, server: EngineServer) -> EmbeddingStats:
        stats: EmbeddingStats = await read(server, lambda core: core.make_stats().embedding_stats)
        return stats

    async def transfers(self, server: EngineServer) -> TransferStats:
        stats: TransferStats = await read(server, lambda core: core.make_stats().transfer_stats)
        return stats


async def read(server: EngineServer, what: Callable[[Any], Any]) -> Any:
    """Ask on the engine's own thread."""
    core = server._core
    return await server._ask(lambda: what(core))


def cache_of(server: EngineServer) -> Tensor:
    executor: Any = server._core.executor
    cache: Tensor = executor._worker.runner.kv_cache
    return cache


@asynccontextmanager
async def engines(
    case: Case,
    *,
    encode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
) -> AsyncIterator[Engines]:
    """encode, prefill: of engine_config()."""
    transfer = KVTransferConfig(
        transport="tcp",
        connect_timeout_s=PATIENT_S,
        link_timeout_s=PATIENT_S,
        chunk_timeout_s=PATIENT_S,
        checksum=True,
    )

    def config(settings: dict[str, Any] | None) -> EngineConfig:
        defaults: dict[str, Any] = {"block_size": 8, "transfer": transfer}
        made = engine_config(case.directory, **(defaults | (settings or {})))
        scheduler = made.scheduler.model_copy(update={"encode_timeout_s": PATIENT_S})
        return made.model_copy(update={"scheduler": scheduler})

    encoding, prefilling = (
        EngineServer(config(encode), "encode-0", 1, TRUST),
        EngineServer(config(prefill), "prefill-0", 1, TRUST),
    )
    try:
        encoder = EngineAddress("encode-0", 1, await encoding.start("127.0.0.1"))
        address = await prefilling.start("127.0.0.1")
        session = EngineSession(
            EngineDescriptor("prefill-0", 1, EngineRole.BOTH, address), member(), timeout_s=PATIENT_S
        )
        await session.open()
        try:
            yield Engines(encoding, prefilling, encoder, session)
        finally:
            await session.close()
    finally:
        await prefilling.stop()
        await encoding.stop()


@pytest.mark.parametrize(
    ("is_shared", "block_sizes"),
    [(True, (8, 8)), (True, (4, 16)), (False, (16, 4))],
    ids=["shared memory", "larger blocks here", "tcp, smaller blocks here"],
)
async def test_tokens_equal_generate_and_the_bytes_go_over_links(
    is_shared: bool, block_sizes: tuple[int, int], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_shared:
        monkeypatch.setattr(os, "memfd_create", forbid_memory_files)
    encode, prefill = ({"block_size": size, "overlap": True} for size in block_sizes)
    asked: dict[str, Sequence[int]] = {"one": (1,), "two": (2, 3), "text": (), "twice": (1, 1)}
    async with engines(case, encode=encode, prefill=prefill) as pair:
        answers = await asyncio.gather(*(pair.ask(case.request(name, seeds)) for name, seeds in asked.items()))
        assert answers == [case.expected(tuple(seeds)) for seeds in asked.values()]
        assert pair.num_fetched == {"one": 1, "two": 2, "text": 0, "twice": 1}
        assert pair.encode.encode_service.num_encoded == 3, "each image once"
        assert num_encoded_by(pair.prefill) == 0
        await pair.assert_whole()
        received = (await pair.embeddings(pair.prefill)).num_received
        assert received in {3, 4}, "one image is shown by two, perhaps at the same time"
        assert await pair.embeddings(pair.prefill) == EmbeddingStats(num_received=received)
        assert await pair.embeddings(pair.encode) == EmbeddingStats(num_sent=received)
        assert await pair.ask(case.request("later", (3, 1))) == case.expected((3, 1))
        assert (await pair.embeddings(pair.prefill)).num_received == received, "what was fetched is kept"
        assert (await pair.transfers(pair.prefill)).num_received_bytes > 0
        if is_shared is False:
            assert (await pair.transfers(pair.encode)).num_sent_bytes > 0
        assert not torch.any(cache_of(pair.encode)), "what was staged is wiped"


class Barrier:
    """Holds the encode engine's chunks up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open, self._is_reached = threading.Event(), threading.Event()
        Faults(before_send=self._wait).install(monkeypatch)

    def open(self) -> None:
        self._is_open.set()

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self._is_reached.wait, PATIENT_S)

    def _wait(self) -> None:
        self._is_reached.set()
        assert self._is_open.wait(PATIENT_S)


class Deadlines:
    """asyncio for a module, with its timeouts in the test's hands: no deadline passes before the test lets it."""

    def __init__(self) -> None:
        self._made: list[asyncio.Timeout] = []

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        self._made.append(asyncio.timeout(delay_s))
        return self._made[-1]

    def let_the_last_one_pass(self) -> None:
        self._made[-1].reschedule(asyncio.get_running_loop().time())

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def assert_encoded_here(pair: Engines, case: Case, answer: asyncio.Task[list[int]], seed: int) -> None:
    """The answer is right all the same, nothing is left behind, and the next image comes over the link again."""
    async with asyncio.timeout(PATIENT_S):
        assert await answer == case.expected((seed,))
    assert num_encoded_by(pair.prefill) == 1
    assert pair.num_fetched == {"r": 0}
    await pair.assert_whole()
    assert not torch.any(cache_of(pair.encode))
    assert (await pair.embeddings(pair.prefill)).num_failed == 1


async def test_a_transfer_past_its_deadline_is_cancelled_and_the_image_is_encoded_here(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, deadlines = Barrier(monkeypatch), Deadlines()
    monkeypatch.setattr(remote_encoding, "asyncio", deadlines)
    async with engines(case) as pair:
        answer = asyncio.create_task(pair.ask(case.request("r", (1,))))
        await barrier.wait_reached()
        deadlines.let_the_last_one_pass()
        assert await answer == case.expected((1,)), "while the chunk is still on its way"
        barrier.open()
        await assert_encoded_here(pair, case, answer, 1)
        assert await pair.ask(case.request("again", (2,))) == case.expected((2,))
        assert (await pair.embeddings(pair.prefill)).num_received == 1


@pytest.mark.parametrize("is_abort", [True, False], ids=["aborted", "its client is gone"])
async def test_a_request_that_ends_while_its_image_travels_leaves_nothing(
    is_abort: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Barrier(monkeypatch)
    async with engines(case) as pair:
        pair.session.submit(replace(case.request("r", (1,)), encoder=pair.encoder))
        await barrier.wait_reached()
        pool = await read(pair.prefill, lambda core: core.scheduler.kv_cache_manager.block_pool)
        assert pool.num_free_blocks < pool.num_blocks
        [encoding] = pair.prefill._encoding.values()
        if is_abort:
            pair.session.abort("r")
        else:
            await pair.session.close()
        await asyncio.wait([encoding], timeout=PATIENT_S)
        barrier.open()
        await pair.assert_whole()
        num_taken = await read(pair.prefill, lambda core: core.num_taken_from_all)
        assert num_taken == 1, "ingresses know by this number which requests a report has"
        assert num_encoded_by(pair.prefill) == 0


async def test_an_encode_engine_that_ends_in_mid_transfer_costs_nothing_but_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Barrier(monkeypatch)
    async with engines(case) as pair:
        answer = asyncio.create_task(pair.ask(case.request("r", (1,))))
        await barrier.wait_reached()
        ending = asyncio.create_task(pair.encode.stop())
        async with asyncio.timeout(PATIENT_S):
            assert await answer == case.expected((1,))
        barrier.open()
        await ending
        assert num_encoded_by(pair.prefill) == 1
        pair.encode = pair.prefill
        await pair.assert_whole()


async def test_bytes_that_were_corrupted_on_their_way_are_not_used(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(blocks: Sequence[Tensor]) -> None:
        blocks[0].view(torch.uint8).view(-1)[5] ^= 4

    Faults(after_receive=flip).install(monkeypatch)
    async with engines(case) as pair:
        answer = asyncio.create_task(pair.ask(case.request("r", (1,))))
        await assert_encoded_here(pair, case, answer, 1)
        assert (await pair.transfers(pair.prefill)).num_corrupt_chunks == 1


async def test_an_encode_engine_whose_cache_is_too_small_sends_nothing(case: Case) -> None:
    async with engines(case, encode={"num_blocks": 1}) as pair:
        answer = asyncio.create_task(pair.ask(case.request("r", (1,))))
        await assert_encoded_here(pair, case, answer, 1)
        assert await pair.embeddings(pair.encode) == EmbeddingStats(num_not_sent=1)
