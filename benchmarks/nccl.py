"""Measure what KV transfer by NCCL reaches on this machine's GPUs.

Self-send beside a plain device copy, by message size; gathering scattered blocks; what a transfer and a matrix product
cost each other; and real links between two processes, by message and block size. With one GPU the two processes pose as
two hosts over loopback, which shows that it works and not how fast; with several, two GPUs are used.

    python -m benchmarks.nccl
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_device import CudaDevice, CudaStream
from kv_transfer.transports.nccl_library import NcclLibrary, load_nccl, nccl_report

_MIB: Final = 1 << 20
_CHUNK_BYTES: Final = 64 * _MIB
_MESSAGE_SIZES: Final = (32 << 10, 256 << 10, _MIB, 2 * _MIB, 4 * _MIB, 16 * _MIB)
_BLOCK_SIZES: Final = (192 << 10, 512 << 10, 2 * _MIB)
_TIMEOUT_S: Final = 60.0
ONE_GPU_ENVIRONMENT: Final = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "4",
}
"""NCCL takes two ranks on one device for a mistake, unless NCCL_HOSTID tells it that they are on two hosts."""


class SelfSend:
    """A communicator of one rank: what it sends to itself is a copy by NCCL's kernels. Use as a context manager."""

    def __init__(self, library: NcclLibrary, device: torch.device) -> None:
        self._library = library
        CudaDevice(device).use()
        self.stream = CudaStream(device)
        self._comm = library.init_rank(1, library.make_unique_id(), 0)

    def __enter__(self) -> SelfSend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.record().synchronize()
        self._comm.abort()
        self.stream.close()

    def move(self, source: Tensor, target: Tensor, message_size_bytes: int) -> None:
        """Queue a copy of a flat uint8 tensor on the stream, as one group."""
        comm, uint8, handle = self._comm, self._library.uint8, self.stream.handle
        self._library.group_start()
        for offset in range(0, source.numel(), message_size_bytes):
            size_bytes = min(message_size_bytes, source.numel() - offset)
            comm.send(source.data_ptr() + offset, size_bytes, uint8, 0, handle)
            comm.recv(target.data_ptr() + offset, size_bytes, uint8, 0, handle)
        self._library.group_end()


def seconds_per_call(stream: CudaStream, call: Callable[[], None], repeats: int = 20) -> float:
    """Mean, after a warm-up, of what a call queues on the stream; host time included."""
    call()
    stream.record().synchronize()
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    stream.record().synchronize()
    return (time.perf_counter() - start_s) / repeats


def run(chunk_mib: Annotated[int, typer.Option(help="Size of a chunk.")] = _CHUNK_BYTES // _MIB) -> None:
    """Print the figures."""
    console = Console()
    report = nccl_report()
    if report.problem or not torch.cuda.is_available():
        console.print(f"cannot run: {report.problem or 'no CUDA device is visible'}", markup=False)
        raise typer.Exit(1)
    device = torch.device("cuda", 0)
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, NCCL {report.cupy_version}")
    console.print(_one_process(device, chunk_mib * _MIB))
    console.print(_two_processes(chunk_mib * _MIB))


def _one_process(device: torch.device, chunk_bytes: int) -> Table:
    table = Table("in one process", "GB/s", title=f"{chunk_bytes // _MIB} MiB")
    source, target = (torch.zeros(chunk_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    with SelfSend(load_nccl(), device) as self_send:
        stream = self_send.stream

        def add(name: str, call: Callable[[], None]) -> float:
            seconds = seconds_per_call(stream, call)
            table.add_row(name, f"{chunk_bytes / seconds / 1e9:.1f}")
            return seconds

        add("plain copy", lambda: stream.copy([target], [source]))
        for size_bytes in _MESSAGE_SIZES:
            add(f"self-send, {_kib(size_bytes)}", lambda size=size_bytes: self_send.move(source, target, size))  # type: ignore[misc]  # a loop's variable
        for size_bytes in _BLOCK_SIZES:
            targets, sources = _scattered(target, size_bytes), list(torch.split(source, size_bytes))
            add(f"gather, {_kib(size_bytes)}", lambda t=targets, s=sources: stream.copy(t, s))  # type: ignore[misc]  # as above
        _add_overlap(table, self_send, source, target)
    return table


def _add_overlap(table: Table, self_send: SelfSend, source: Tensor, target: Tensor) -> None:
    """A product on the default stream beside copies on the link's: ratios to each alone."""
    a = torch.randn(8192, 8192, device=source.device, dtype=torch.bfloat16)

    def multiply() -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's own
        events[0].record()
        for _ in range(20):
            torch.mm(a, a)
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]))

    multiply()
    alone_ms = multiply()
    for _ in range(200):
        self_send.move(source, target, 4 * _MIB)
    beside_ms = multiply()
    table.add_row("matrix product beside self-send", f"{beside_ms / alone_ms:.2f} x its time alone")


def _scattered(pool: Tensor, size_bytes: int) -> list[Tensor]:
    blocks = list(torch.split(pool, size_bytes))
    return [*blocks[::2], *blocks[1::2]]


# -- two processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    block_size_bytes: int
    message_size_bytes: int


def _two_processes(chunk_bytes: int) -> Table:
    num_gpus = torch.cuda.device_count()
    title = "two GPUs" if num_gpus > 1 else "one GPU, over loopback: not a speed"
    table = Table("blocks", "messages up to", "open, s", "GB/s", title=f"links between two processes, {title}")
    cases = [_Case(block, message) for block in _BLOCK_SIZES for message in _MESSAGE_SIZES]
    context = multiprocessing.get_context("spawn")
    pipe, ends = context.Pipe()
    near, far = context.Pipe()
    for index, (end_pipe, out) in enumerate(((near, ends), (far, None))):
        environment = {} if num_gpus > 1 else {**ONE_GPU_ENVIRONMENT, "NCCL_HOSTID": f"host-{index}"}
        arguments = (index % num_gpus, environment, cases, chunk_bytes, end_pipe, out)
        context.Process(target=_run_end, args=arguments, daemon=True).start()
    for case in cases:
        if not pipe.poll(_TIMEOUT_S):
            table.add_row(_kib(case.block_size_bytes), _kib(case.message_size_bytes), "no answer", "")
            break
        open_s, seconds = pipe.recv()
        speed = chunk_bytes / seconds / 1e9
        table.add_row(_kib(case.block_size_bytes), _kib(case.message_size_bytes), f"{open_s:.2f}", f"{speed:.1f}")
    return table


def _run_end(
    gpu: int,
    environment: dict[str, str],
    cases: Sequence[_Case],
    chunk_bytes: int,
    peer: Connection,
    out: Connection | None,
) -> None:
    """out: the producer's, to which it says (seconds to open a link, seconds per chunk) of each case."""
    os.environ.update(environment)
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    library, pool = load_nccl(), torch.zeros(chunk_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    for case in cases:
        transport = NcclTransport(
            library, CudaDevice(device), print, _TIMEOUT_S, message_size_bytes=case.message_size_bytes
        )
        blocks = _scattered(pool, case.block_size_bytes)
        start_s = time.perf_counter()
        if out is not None:
            pending = transport.listen()
            peer.send(pending.rendezvous)
            link, move = (opened := pending.accept(_TIMEOUT_S)), opened.send
        else:
            link, move = (opened := transport.connect(peer.recv(), _TIMEOUT_S)), opened.receive
        open_s = time.perf_counter() - start_s
        move(blocks, _TIMEOUT_S)
        start_s = time.perf_counter()
        for _ in range(10):
            move(blocks, _TIMEOUT_S)
        if out is not None:
            out.send((open_s, (time.perf_counter() - start_s) / 10))
        # Both ends have finished: an abort must not overtake the other's last bytes.
        peer.send("over")
        peer.recv()
        link.close()


def _kib(size_bytes: int) -> str:
    return f"{size_bytes >> 10} KiB" if size_bytes < _MIB else f"{size_bytes // _MIB} MiB"


if __name__ == "__main__":
    typer.run(run)
