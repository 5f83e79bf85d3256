"""The answers of a producer's end to a Hello."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, ControlMessage, Hello, Refused, Welcome
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.links.peer_link import PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob
from kv_transfer.params import EngineAddress
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.trust.handshake import Party, Proven
from kv_transfer.trust.secret import Purpose, SessionKey
from tests.kv_transfer.connected_workers import LAYOUT

PRODUCER = EngineAddress("prefill-0", 3, "prefill-0")


class OnGpu(torch.Tensor):
    """Memory that says it is a GPU's."""

    device = torch.device("cuda")


class Stream:
    """The consumer's end hears what is said on it."""

    proven: Proven | None = Proven(
        Purpose.CONTROL, Party("decode-0", 7), Party(PRODUCER.engine_id, PRODUCER.incarnation), SessionKey(bytes(32))
    )

    def __init__(self) -> None:
        self.said: list[ControlMessage] = []
        self.is_closed = False

    def send(self, message: ControlMessage) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.is_closed = True


class Deaf:
    """An agent that is told nothing here."""

    def on_message(self, stream: object, message: ControlMessage) -> None:
        pass

    def on_malformed(self, stream: object, reason: str) -> None:
        pass

    def on_closed(self, stream: object, reason: str) -> None:
        pass

    def on_chunk_moved(self, link: PeerLink, job: ChunkJob) -> None:
        pass

    def on_data_dead(self, link: PeerLink, reason: str) -> None:
        pass


def answer(consumer: KVCacheLayout, kv_cache: torch.Tensor) -> ControlMessage:
    hub, stream = LoopbackHub(), Stream()
    transport = LoopbackTransport(hub)
    links = LinkTable(KVTransferConfig(), PRODUCER, LAYOUT, kv_cache, transport, hub.control(PRODUCER), Deaf())
    links.welcome(stream, Hello(PROTOCOL_VERSION, "decode-0", 7, "prefill-0", 3, transport.name, consumer))
    links.close_all(60.0)
    return stream.said[0]


@pytest.mark.parametrize("consumer", [LAYOUT, replace(LAYOUT, num_blocks=5), replace(LAYOUT, block_size=8)])
def test_a_consumer_is_welcomed_and_told_what_a_block_is_here(consumer: KVCacheLayout) -> None:
    assert answer(consumer, torch.zeros(LAYOUT.shape)) == Welcome("0", LAYOUT)


def test_on_gpus_block_sizes_must_be_equal() -> None:
    on_gpu = torch.zeros(LAYOUT.shape).as_subclass(OnGpu)
    assert isinstance(answer(LAYOUT, on_gpu), Welcome)
    assert answer(replace(LAYOUT, block_size=8), on_gpu) == Refused(
        "block_size: 8 at the consumer, 4 at the producer, which only engines on CPUs may have"
    )
