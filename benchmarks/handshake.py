"""Measure what a proof of the cluster's secret costs: the machines alone, over a socket, and in front of a gRPC call.

python -m benchmarks.handshake
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import grpc.aio
from rich.console import Console
from rich.table import Table

from kv_transfer.trust.grpc_proof import GrpcAcceptor, prove
from kv_transfer.trust.handshake import Acceptor, Dialer, Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial
from kv_transfer.trust.secret import Purpose
from kv_transfer.trust.socket_handshake import accept_proof, dial_proof

_REPEATS: Final = 300
_TIMEOUT_S: Final = 30.0
_TRUST: Final = Trust(TrustMaterial.draw())
_INGRESS, _ENGINE = Party("ingress-0", 1), Party("decode-0", 1)


def main() -> None:
    """Print the table."""
    table = Table("what", "median µs", "p99 µs")
    for name, times in (
        ("both machines, no I/O", _timed(_machines)),
        ("over a local socket, both ends on threads", _timed(_SocketPair())),
        *asyncio.run(_grpc()),
    ):
        times.sort()
        table.add_row(name, f"{statistics.median(times) * 1e6:.0f}", f"{times[len(times) * 99 // 100] * 1e6:.0f}")
    Console().print(table)


def _timed(function: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun_s)
    return times


def _machines() -> None:
    dialer, acceptor = Dialer(_TRUST, Purpose.SESSION, _INGRESS, _ENGINE), Acceptor(_TRUST, Purpose.SESSION, _ENGINE)
    proof, _ = dialer.prove(acceptor.answer(dialer.challenge))
    acceptor.verify(proof)


class _SocketPair:
    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._threads = ThreadPoolExecutor(1)

    def __call__(self) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        acceptor = Acceptor(_TRUST, Purpose.DATA_LINK, _ENGINE)
        accepting = self._threads.submit(accept_proof, self._far, acceptor, deadline_s)
        dial_proof(self._near, Dialer(_TRUST, Purpose.DATA_LINK, _INGRESS, _ENGINE), deadline_s)
        accepting.result()


async def _grpc() -> list[tuple[str, list[float]]]:
    acceptor = GrpcAcceptor(_TRUST)
    acceptor.register(Purpose.SESSION, _ENGINE)

    async def proven(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await acceptor.check(context, Purpose.SESSION)
        async for message in messages:
            yield message

    async def plain(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        del context
        async for message in messages:
            yield message

    methods: dict[str, Any] = {
        "Proven": grpc.stream_stream_rpc_method_handler(proven),
        "Plain": grpc.stream_stream_rpc_method_handler(plain),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((acceptor.handler(), grpc.method_handlers_generic_handler("bench.Echo", methods)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    times: dict[str, list[float]] = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, begin in (("a stream's first answer, plain", _begin_plain), ("the same, proven", _begin_proven)):
            times[name] = [await begin(channel) for _ in range(_REPEATS)]
    await server.stop(0)
    return list(times.items())


async def _begin_plain(channel: grpc.aio.Channel) -> float:
    begun_s = time.perf_counter()
    method: Any = channel.stream_stream("/bench.Echo/Plain")
    return await _first_answer(method(timeout=_TIMEOUT_S), begun_s)


async def _begin_proven(channel: grpc.aio.Channel) -> float:
    begun_s = time.perf_counter()
    proof = await prove(channel, Member(_INGRESS, _TRUST), Purpose.SESSION, _ENGINE, _TIMEOUT_S)
    method: Any = channel.stream_stream("/bench.Echo/Proven")
    call = method(metadata=proof.metadata, timeout=_TIMEOUT_S)
    await proof.confirm(call)
    return await _first_answer(call, begun_s)


async def _first_answer(call: Any, begun_s: float) -> float:
    await call.write(b"hello")
    await call.read()
    taken_s = time.perf_counter() - begun_s
    call.cancel()
    return taken_s


if __name__ == "__main__":
    main()
