"""Attacks from the host and from within the cluster on engines in processes of their own: refused, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import grpc.aio
import msgspec
import pytest

from actors.core.requests.request import EngineCoreRequest
from actors.sessions.remote_encoding import ENCODE_METHOD
from actors.sessions.session_messages import SESSION_METHOD, Submit
from actors.sessions.session_messages import encode as encode_session
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Hello
from kv_transfer.links.grpc_control import CONTROL_METHOD
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.trust.grpc_proof import prove
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.secret import Purpose
from tests.faults.engine_process import EngineProcess
from tests.faults.live_engines import LiveEngines
from tests.kv_transfer.connected_workers import LAYOUT
from tests.trusted import member

METHODS = {Purpose.SESSION: SESSION_METHOD, Purpose.CONTROL: CONTROL_METHOD, Purpose.ENCODE: ENCODE_METHOD}
TIMEOUT_S = 60.0


@pytest.fixture(params=["tcp_engines", "sharing_engines"], ids=["tcp", "shared memory"])
def engines(request: pytest.FixtureRequest) -> LiveEngines:
    """Both ways that engines of one host are joined."""
    started = request.getfixturevalue(request.param)
    assert isinstance(started, LiveEngines)
    return started


def party(engine: EngineProcess) -> Party:
    return Party(engine.spec.engine_id, engine.spec.incarnation)


class Attacker:
    """An async context manager that says things on streams of its own, each of which stays open to its end.

    A stream that is cancelled early may take the frame with it that the engine was to refuse and count.
    """

    def __init__(self) -> None:
        self._open = contextlib.AsyncExitStack()
        self._said: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        await asyncio.gather(*self._said, return_exceptions=True)

    async def say(self, engine: EngineProcess, purpose: Purpose, frame: bytes, *, is_member: bool) -> None:
        """Send one frame on a stream, with or without a proof, and wait a moment for the engine to end the stream."""
        channel = await self._open.enter_async_context(grpc.aio.insecure_channel(engine.address))
        metadata: Any = ()
        if is_member:
            metadata = (await prove(channel, member("evil-0"), purpose, party(engine), TIMEOUT_S)).metadata
        stream: Any = channel.stream_stream(METHODS[purpose])
        call = stream(metadata=metadata)
        self._open.callback(call.cancel)
        # Whoever cancels a read cancels the stream.
        said = asyncio.create_task(self._say(call, frame))
        self._said.append(said)
        await asyncio.wait({said}, timeout=0.3)

    async def _say(self, call: Any, frame: bytes) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(frame)
            while await call.read() is not grpc.aio.EOF:
                pass


def bad_hellos(engine: EngineProcess) -> Iterator[bytes]:
    """Yield what ended an engine before fields had ranges, and a Hello in the name of another engine."""
    hello = Hello(PROTOCOL_VERSION, "evil-0", 1, engine.spec.engine_id, engine.spec.incarnation, "tcp", LAYOUT)
    for fields in ({"num_replicas": 0}, {"block_size": 0}, {"block_size": 2**60}, {"tp_size": 3, "num_replicas": 2}):
        yield msgspec.msgpack.encode(msgspec.to_builtins(hello) | {"layout": asdict(LAYOUT) | fields})
    yield msgspec.msgpack.encode(msgspec.structs.replace(hello, engine_id="decode-0"))


def bad_submits(request: EngineCoreRequest) -> Iterator[bytes]:
    for token_id in (10**6, -5, 2**40):
        wrong = replace(request, request_id=f"evil-{token_id}", prompt_token_ids=[1, token_id])
        yield encode_session(Submit([wrong], 0.0))
    biased = replace(request.sampling_params, logit_bias={10**7: 1.0})
    yield encode_session(Submit([replace(request, request_id="evil-bias", sampling_params=biased)], 0.0))


def local_sockets() -> set[str]:
    """Return the names of all sockets of KV links, as every user of the host sees them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@raypd-kv" in line}


@contextlib.asynccontextmanager
async def strangers_at_every_socket() -> AsyncIterator[None]:
    """Somebody calls each socket of a KV link within this host, again and again, and says nothing."""

    async def call() -> None:
        while True:
            for name in local_sockets():
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
                    stranger.setblocking(False)
                    stranger.connect("\0" + name.removeprefix("@"))
                    await asyncio.sleep(0)
                    _, fds, _, _ = socket.recv_fds(stranger, 4096, 4)
                    assert fds == [], "a stranger has a pool"
            await asyncio.sleep(0.002)

    calling = asyncio.create_task(call())
    try:
        yield
        assert not calling.done()
    finally:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


def check_pool_is_sealed(engine: EngineProcess) -> None:
    """Check that a process that gets at the descriptor of a pool, here as the same user, cannot write by it."""
    pid = engine._process.pid
    pools = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "memfd:raypd-kv" in str(fd.readlink())]
    assert pools
    for pool in pools:
        fd = os.open(pool, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"forged", 0)
        finally:
            os.close(fd)


async def test_a_pair_of_engines_outlives_attacks_from_inside_and_answers_as_before(engines: LiveEngines) -> None:
    prefill, decode = await engines.start_pair()
    await engines.check_handed_over(prefill, decode)
    is_shared = engines._is_pool_shared and engines._link_kind == "SharedMemoryLink"
    draw = random.Random(1)
    async with Attacker() as attacker, strangers_at_every_socket():
        say = attacker.say
        for engine in (prefill, decode):
            request = engines.ask().request
            for purpose in METHODS:
                await say(engine, purpose, draw.randbytes(200), is_member=False)
                await say(engine, purpose, draw.randbytes(200), is_member=True)
            for frame in bad_hellos(engine):
                await say(engine, Purpose.CONTROL, frame, is_member=True)
            for frame in bad_submits(request):
                await say(engine, Purpose.SESSION, frame, is_member=True)
        victim = engines.ask(may_hit_cache=True)
        forger = EngineAddress("evil-0", 1, "127.0.0.1:9")
        ticket = KVTransferParams("forged", 0, TransferRole.CONSUMER, forger)
        forged = replace(victim.request, request_id="evil-ticket", kv_transfer_params=ticket)
        await say(decode, Purpose.SESSION, encode_session(Submit([forged], 0.0)), is_member=True)
        await engines.check_pair(victim, prefill, decode)
        for _ in range(3):
            await engines.check_pair(engines.ask(), prefill, decode)
        if is_shared:
            check_pool_is_sealed(prefill)
        for engine in (prefill, decode):
            assert engine.is_alive
            async with asyncio.timeout(TIMEOUT_S):
                while not is_counted(engines, engine):  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.1)
    await engines.check_handed_over(prefill, decode)


def is_counted(engines: LiveEngines, engine: EngineProcess) -> bool:
    """Whether what the engine tells an ingress has all that was refused, by kind."""
    stats, _ = engines.session(engine).last_stats or (None, 0.0)
    if stats is None or stats.num_refused_connections < len(METHODS):
        return False
    counted = stats.all_refused_messages
    expected = {
        "malformed image": 1,
        "malformed session message": 1,
        "refused request": 4,
        "malformed message": 5,
        "hello refused": 1,
    }
    assert all(counted.get(kind, 0) <= count for kind, count in expected.items()), counted
    return expected.items() <= counted.items()
