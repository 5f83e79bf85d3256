"""How fast KV moves between two processes of one host, beside what the machine can do.

python -m benchmarks.kv_transfer [--block-kib 1024] [--num-blocks 64] [--repeats 20] [--chunk-mib 1 8 32]

Links are measured with everything in one chunk, and in chunks of these sizes, as engines use them (max_chunk_bytes).
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.checksum import checksum_of
from kv_transfer.transports.shared_pool import allocate_shared_pool
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.tls import InternalTls

_HOST = "127.0.0.1"
_TIMEOUT_S = 120.0
_WAYS = ("tcp", "tcp, TLS", "shared memory")


def main() -> None:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layout = make_layout(arguments.block_kib, arguments.num_blocks)
    size_bytes = layout.block_size_bytes * layout.num_blocks
    print(f"{layout.num_blocks} scattered blocks of {arguments.block_kib} KiB\n")
    print("| way | median ms | GB/s |\n|---|---|---|")
    rows = {"memcpy, one thread": measure_memcpy(layout, arguments.repeats)}
    everything = layout.num_blocks
    raw = in_two_processes(_receive_raw, "raw", layout, everything, arguments.repeats)
    rows["loopback socket, sendall and recv_into"] = raw
    for way in _WAYS:
        rows[way] = in_two_processes(receive_chunks, way, layout, everything, arguments.repeats)
        for chunk_mib in arguments.chunk_mib:
            num_blocks = max(1, chunk_mib * 1024 // arguments.block_kib)
            seconds = in_two_processes(receive_chunks, way, layout, num_blocks, arguments.repeats)
            rows[f"{way}, chunks of {chunk_mib} MiB"] = seconds
        seconds = in_two_processes(_receive_checked, f"{way}, checked", layout, num_blocks, arguments.repeats)
        rows[f"{way}, chunks of {chunk_mib} MiB, checksum"] = seconds
    for name, seconds in rows.items():
        median_s = statistics.median(seconds)
        print(f"| {name} | {median_s * 1e3:.1f} | {size_bytes / median_s / 1e9:.2f} |")


def make_layout(block_kib: int, num_blocks: int) -> KVCacheLayout:
    """One head and layer of 16 tokens: only the size matters."""
    return KVCacheLayout(num_blocks, 1, 1, 16, block_kib * 1024 // (16 * 2 * 4), "float32", 4, "benchmark")


def make_pool(way: str, layout: KVCacheLayout) -> Tensor:
    """Touched memory."""
    pool = allocate_shared_pool(layout) if way.startswith("shared memory") else torch.zeros(layout.shape)
    return pool.fill_(1.0)


def shuffled_blocks(pool: Tensor, seed: int) -> list[Tensor]:
    """All blocks in an order of their own."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    return [pool[block_id] for block_id in order.tolist()]


def measure_memcpy(layout: KVCacheLayout, repeats: int) -> list[float]:
    """Block by block, within one process."""
    sources = shuffled_blocks(make_pool("memcpy", layout), 0)
    targets = shuffled_blocks(make_pool("memcpy", layout), 1)

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return timed(copy, repeats)


def timed(action: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of each call, the first of which is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start_s)
    return seconds[1:]


_Receiver = Callable[[Connection, KVCacheLayout, int, int], None]


def in_two_processes(
    receive: _Receiver, way: str, layout: KVCacheLayout, blocks_per_chunk: int, repeats: int
) -> list[float]:
    """The producer sends from here; the seconds are the consumer's, from asking to having."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    consumer = context.Process(target=receive, args=(theirs, layout, blocks_per_chunk, repeats))
    consumer.start()
    theirs.close()
    pool = make_pool(way, layout)
    if way == "raw":
        _send_raw(ours, pool)
    else:
        material = draw_tls_material() if way.startswith("tcp, TLS") else None
        ours.send(material)
        tls = None if material is None else InternalTls(material)
        _send_chunks(ours, pool, blocks_per_chunk, tls, is_checked=way.endswith("checked"))
    seconds: list[float] = ours.recv()
    consumer.join(_TIMEOUT_S)
    return seconds


def _chunks(blocks: list[Tensor], blocks_per_chunk: int) -> list[list[Tensor]]:
    return [blocks[start : start + blocks_per_chunk] for start in range(0, len(blocks), blocks_per_chunk)]


def _send_chunks(
    consumer: Connection, pool: Tensor, blocks_per_chunk: int, tls: InternalTls | None, *, is_checked: bool
) -> None:
    pending = TcpTransport(_HOST, pool, silence_timeout_s=10.0, tls=tls).listen()
    consumer.send(pending.rendezvous)
    link = pending.accept(_TIMEOUT_S)
    chunks = _chunks(shuffled_blocks(pool, 0), blocks_per_chunk)
    while consumer.recv():
        for chunk in chunks:
            link.send(chunk, _TIMEOUT_S)
            if is_checked:
                checksum_of(chunk)
    link.close()


def receive_chunks(producer: Connection, layout: KVCacheLayout, blocks_per_chunk: int, repeats: int) -> None:
    """The consumer's process, for in_two_processes()."""
    _receive(producer, layout, blocks_per_chunk, repeats, is_checked=False)


def _receive_checked(producer: Connection, layout: KVCacheLayout, blocks_per_chunk: int, repeats: int) -> None:
    _receive(producer, layout, blocks_per_chunk, repeats, is_checked=True)


def _receive(
    producer: Connection, layout: KVCacheLayout, blocks_per_chunk: int, repeats: int, *, is_checked: bool
) -> None:
    torch.set_num_threads(1)
    pool = make_pool("target", layout)
    material = producer.recv()
    tls = None if material is None else InternalTls(material)
    link = TcpTransport(_HOST, pool, silence_timeout_s=10.0, tls=tls).connect(producer.recv(), _TIMEOUT_S)
    chunks = _chunks(shuffled_blocks(pool, 1), blocks_per_chunk)

    def receive() -> None:
        producer.send(True)
        for chunk in chunks:
            link.receive(chunk, _TIMEOUT_S)
            if is_checked:
                checksum_of(chunk)

    seconds = timed(receive, repeats)
    producer.send(False)
    producer.send(seconds)
    link.close()


def _send_raw(consumer: Connection, pool: Tensor) -> None:
    with socket.create_server((_HOST, 0)) as listener:
        consumer.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            while consumer.recv():
                connection.sendall(pool.view(-1).numpy().data.cast("B"))


def _receive_raw(producer: Connection, layout: KVCacheLayout, blocks_per_chunk: int, repeats: int) -> None:
    del blocks_per_chunk
    buffer = make_pool("target", layout).view(-1).numpy().data.cast("B")
    with socket.create_connection((_HOST, producer.recv())) as connection:

        def receive() -> None:
            producer.send(True)
            waiting = buffer
            while waiting.nbytes:
                waiting = waiting[connection.recv_into(waiting) :]

        seconds = timed(receive, repeats)
        producer.send(False)
        producer.send(seconds)


if __name__ == "__main__":
    main()
