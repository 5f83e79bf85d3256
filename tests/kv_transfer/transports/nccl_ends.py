"""Two NCCL transports over one fake network, and links between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.transports.nccl import NcclLink, NcclTransport
from tests.kv_transfer.transports.fake_nccl import FakeEnd, FakeNetwork

TIMEOUT_S = 60.0


@dataclass(slots=True)
class End:
    """One engine's side; what it says of wedged links is kept."""

    fake: FakeEnd
    transport: NcclTransport
    wedged: list[str]


def make_end(network: FakeNetwork, *, message_size_bytes: int = 64, abort_timeout_s: float = TIMEOUT_S) -> End:
    fake, wedged = FakeEnd(network), list[str]()
    transport = NcclTransport(
        fake.nccl,
        fake.device,
        wedged.append,
        abort_timeout_s,
        message_size_bytes=message_size_bytes,
    )
    return End(fake, transport, wedged)


def start(call: Callable[[], object]) -> Future[None]:
    """Run a call on a thread of its own."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future


def open_link(producer: End, consumer: End) -> tuple[NcclLink, NcclLink]:
    pending = producer.transport.listen()
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(pending.accept, TIMEOUT_S)
        connected = pool.submit(consumer.transport.connect, pending.rendezvous, TIMEOUT_S)
        return accepted.result(), connected.result()


@contextmanager
def linked(producer: End, consumer: End) -> Iterator[tuple[NcclLink, NcclLink]]:
    links = open_link(producer, consumer)
    try:
        yield links
    finally:
        for link in links:
            link.close()


def random_blocks(num_blocks: int, size_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_blocks, size_bytes), generator=generator, dtype=torch.uint8)
