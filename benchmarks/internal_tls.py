"""Measure what TLS inside a cluster costs: sessions, control streams, ranks and KV over TCP, each beside plain text.

python -m benchmarks.internal_tls [--pairs 5] [--only sessions]

Each pair is plain and TLS, one after the other; the ratio is of a pair. Two processes each, on this host.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final

import grpc.aio
import torch
from rich.console import Console
from rich.table import Table

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import SamplingParams
from actors.ranks.rank_control import RankControl
from actors.sessions.block_messages import CachedBlocks
from actors.sessions.session_server import SessionServer
from benchmarks.kv_transfer import in_two_processes, make_layout, receive_chunks
from cluster.bench.pairs import MIN_PAIRS, median_interval
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.handoff.control_messages import Chunk, ControlMessage
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.params import EngineAddress
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial
from kv_transfer.trust.tls import listen

_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 2.0
_ENGINE, _INGRESS = Party("decode-0", 1), Party("ingress-0", 1)
_NUM_REQUESTS: Final = 64
_NUM_STEPS: Final = 1500
_NUM_MESSAGES: Final = 2000


def main() -> None:
    """Print one row for each measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, choices=range(MIN_PAIRS, 31))
    parser.add_argument("--only", choices=list(_MEASURES), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("what", "plain, median", "TLS, median", "TLS / plain, median", "90 % interval")
    for group in arguments.only or list(_MEASURES):
        measure = _MEASURES[group]
        pairs = [(measure(_plain()), measure(_encrypted())) for _ in range(arguments.pairs)]
        for name in pairs[0][0]:
            plain, encrypted = ([pair[end][name] for pair in pairs] for end in (0, 1))
            ratios = [after / before for before, after in zip(plain, encrypted, strict=True)]
            low, high = median_interval(ratios)
            table.add_row(
                name,
                f"{statistics.median(plain):.4g}",
                f"{statistics.median(encrypted):.4g}",
                f"{statistics.median(ratios):.2f}",
                f"{low:.2f} to {high:.2f}",
            )
    Console(width=160).print(table)
    print(f"load of this host at the end: {os.getloadavg()[0]:.1f}")


def _plain() -> TrustMaterial:
    return TrustMaterial.draw()


def _encrypted() -> TrustMaterial:
    return replace(TrustMaterial.draw(), tls=draw_tls_material())


def _sessions(material: TrustMaterial) -> dict[str, float]:
    """An engine in a process of its own sends steps of 64 tokens as fast as one ingress, this process, takes them."""
    with _child(_serve_session, material) as child:
        wall_s, cpu_s = asyncio.run(_read_session(child, Trust(material)))
        child.send(None)
        engine_cpu_s: float = child.recv()
    num_tokens = _NUM_STEPS * _NUM_REQUESTS
    return {
        "session: tokens/s": num_tokens / wall_s,
        "session: processor time, us a step of 64 tokens, engine": engine_cpu_s / _NUM_STEPS * 1e6,
        "session: the same, ingress": cpu_s / _NUM_STEPS * 1e6,
    }


async def _read_session(child: Connection, trust: Trust) -> tuple[float, float]:
    address = child.recv()
    session = EngineSession(
        EngineDescriptor(_ENGINE.name, 1, EngineRole.DECODE, address), Member(_INGRESS, trust), timeout_s=10.0
    )
    await session.open()
    streams = [session.submit(_request(number)) for number in range(_NUM_REQUESTS)]
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.timeout(_TIMEOUT_S):
        counts = await asyncio.gather(*map(_count, streams))
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    assert counts == [_NUM_STEPS] * _NUM_REQUESTS
    await session.close()
    return wall_s, cpu_s


async def _count(stream: AsyncIterator[EngineCoreOutput]) -> int:
    return sum([1 async for _ in stream])


def _request(number: int) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=f"request-{number:08d}", prompt_token_ids=[1], sampling_params=SamplingParams())


class _TokenSource:
    """Answers, once all requests are there, with all steps at once."""

    def stats_for(self, client_index: int) -> SchedulerStats:
        """Return empty counters."""
        return SchedulerStats()

    async def send_cached_blocks(self, begin: int, deliver: Callable[[CachedBlocks], None]) -> int | None:
        """Send nothing."""

    def __init__(self) -> None:
        self.server: SessionServer
        self._num_requests = 0
        self.begun_cpu_s = 0.0

    def find_mistake(self, request: EngineCoreRequest) -> str | None:
        """Implement SessionEngine."""
        return None

    def submit(self, requests: list[EngineCoreRequest], client_index: int) -> None:
        """Implement SessionEngine."""
        self._num_requests += len(requests)
        if self._num_requests < _NUM_REQUESTS:
            return
        self.begun_cpu_s = time.process_time()
        for step in range(_NUM_STEPS):
            reason = FinishReason.LENGTH if step == _NUM_STEPS - 1 else None
            outputs = [
                EngineCoreOutput(
                    request_id=f"request-{number:08d}",
                    attempt=0,
                    new_token_ids=[step],
                    first_position=step,
                    finish_reason=reason,
                )
                for number in range(_NUM_REQUESTS)
            ]
            self.server.deliver({client_index: EngineCoreOutputs(outputs)})

    def abort(self, requests: list[tuple[str, int]], client_index: int) -> None:
        """Implement SessionEngine."""


def _serve_session(parent: Connection, material: TrustMaterial) -> None:
    asyncio.run(_serve_session_on_loop(parent, Trust(material)))


async def _serve_session_on_loop(parent: Connection, trust: Trust) -> None:
    source, grpc_server, acceptor = _TokenSource(), grpc.aio.server(), GrpcAcceptor(trust)
    source.server = SessionServer(source, _ENGINE.name, _ENGINE.incarnation, acceptor)
    grpc_server.add_generic_rpc_handlers((source.server.handler(), acceptor.handler()))
    port = listen(grpc_server, f"{_HOST}:0", trust.tls)
    await grpc_server.start()
    parent.send(f"{_HOST}:{port}")
    await asyncio.to_thread(parent.recv)
    parent.send(time.process_time() - source.begun_cpu_s)
    await grpc_server.stop(0)


def _control_streams(material: TrustMaterial) -> dict[str, float]:
    """A message of a handoff to an engine in another process and back, one at a time."""
    with _child(_echo_control, material) as child:
        control = RankControl(_HOST, Member(_INGRESS, Trust(material)), link_timeout_s=5.0)
        answers = _Answers()
        stream = control.control.dial(EngineAddress(_ENGINE.name, 1, child.recv()), answers)
        times = []
        for number in range(_NUM_MESSAGES):
            begun_s = time.perf_counter()
            stream.send(Chunk("transfer", 0, number, 1))
            answers.wait()
            times.append(time.perf_counter() - begun_s)
        control.close()
        child.send(None)
    times = times[_NUM_MESSAGES // 10 :]
    return {"control stream: message and answer, us": statistics.median(times) * 1e6}


class _Answers:
    """StreamEvents of the end that asks."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """An answer."""
        self._arrived.release()

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        """No answer: wait() ends with its timeout."""

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        """Do the same as on_malformed()."""

    def wait(self) -> None:
        """Raises TimeoutError."""
        if not self._arrived.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError("no answer on the control stream")


class _Echo(_Answers):
    """StreamEvents of the end that answers."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """Send it back."""
        stream.send(message)


def _echo_control(parent: Connection, material: TrustMaterial) -> None:
    control = RankControl(_HOST, Member(_ENGINE, Trust(material)), link_timeout_s=5.0)
    control.control.serve(_Echo())
    parent.send(control.address)
    parent.recv()
    control.close()


def _ranks(material: TrustMaterial) -> dict[str, float]:
    """A forward of the demo model on two ranks, and a step's way to the further rank and back."""
    # Imported here: the processes of the other measures need not wait for transformers.
    from benchmarks.tensor_parallel import hub_round_trip_s, time_forwards_on_two_ranks

    forwards = time_forwards_on_two_ranks(material)
    times = {f"two ranks: forward, {batch}, ms": seconds * 1e3 for batch, seconds in forwards.items()}
    return times | {"two ranks: a step's way and back, us": hub_round_trip_s(material, repeats=400) * 1e6}


def _kv(material: TrustMaterial) -> dict[str, float]:
    """64 MiB of scattered blocks of 1 MiB, in chunks of 8 MiB."""
    layout = make_layout(1024, 64)
    seconds = in_two_processes(receive_chunks, "tcp" if material.tls is None else "tcp, TLS", layout, 8, 15)
    return {"KV over TCP: GB/s": layout.block_size_bytes * layout.num_blocks / statistics.median(seconds) / 1e9}


_MEASURES: Final[dict[str, Callable[[TrustMaterial], dict[str, float]]]] = {
    "sessions": _sessions,
    "control": _control_streams,
    "ranks": _ranks,
    "kv": _kv,
}


class _child:  # noqa: N801  # reads as a function
    """A process with a pipe to this one; it has ended, or is ended, with the block."""

    def __init__(self, work: Callable[[Connection, TrustMaterial], None], material: TrustMaterial) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, material))

    def __enter__(self) -> Connection:
        self._process.start()
        return self._pipe

    def __exit__(self, *_: object) -> None:
        self._process.join(_END_TIMEOUT_S)
        self._process.kill()


if __name__ == "__main__":
    main()
