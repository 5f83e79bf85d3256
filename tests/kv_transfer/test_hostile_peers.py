"""A peer that knows the protocol and breaks it loses its stream. The engine lives, and other links go on.

Tests of kv_transfer/links/control_streams.py, kv_transfer/links/grpc_control.py,
kv_transfer/links/refused_messages.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.handoff.control_messages import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    ChunkSum,
    ControlMessage,
    Finished,
    Hello,
    Ping,
    Pong,
    Ready,
    Refused,
    Welcome,
    encode,
)
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.grpc_control import GrpcControl
from kv_transfer.params import EngineAddress
from kv_transfer.trust.grpc_proof import GrpcAcceptor
from tests.kv_transfer.connected_workers import LAYOUT, Node, Pair, connected_pair
from tests.trusted import TRUST, member

SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14
STRANGE_CONSUMER = "decode-9"
TIMEOUT_S = 60.0
READY = Ready("t-x", 0, 0, NUM_TOKENS)


class Attacker:
    """The other end of a control stream, in the test's hands."""

    def __init__(self) -> None:
        self.heard: list[ControlMessage] = []
        self._has_news = threading.Condition()
        self._is_closed = False

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        with self._has_news:
            self.heard.append(message)
            self._has_news.notify_all()

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        raise AssertionError(f"engines say nothing malformed: {reason}")

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        with self._has_news:
            self._is_closed = True
            self._has_news.notify_all()

    def wait_closed(self) -> None:
        with self._has_news:
            assert self._has_news.wait_for(lambda: self._is_closed, TIMEOUT_S), f"only heard {self.heard}"

    def wait_for(self, *kinds: type[ControlMessage]) -> None:
        with self._has_news:
            is_there = self._has_news.wait_for(lambda: any(isinstance(one, kinds) for one in self.heard), TIMEOUT_S)
            assert is_there, f"only heard {self.heard}"


@contextmanager
def attack(pair: Pair, victim: Node) -> Iterator[tuple[Attacker, ControlStream]]:
    """Dial the victim as the pair's other engine does, and check at the end that it serves as before."""
    attacker = Attacker()
    stream = dial_as(STRANGE_CONSUMER, victim, attacker)
    yield attacker, stream
    stream.close()
    received = pair.hand_over("after", SOURCE, TARGET, NUM_TOKENS)
    assert received.outcome is LoadOutcome.LOADED


def dial_as(name: str, victim: Node, attacker: Attacker) -> ControlStream:
    """Dial as another engine of the cluster, which has proven to be that one."""
    own = victim.control
    assert isinstance(own, GrpcControl)
    return GrpcControl(own._loop, member(name), GrpcAcceptor(TRUST), link_timeout_s=TIMEOUT_S).dial(
        victim.address, attacker
    )


def wait_dropped(node: Node, dropped: dict[str, int]) -> None:
    node.wait_stats(lambda stats: stats.dropped_messages == dropped)


def hello(pair: Pair, layout: KVCacheLayout = LAYOUT, name: str = STRANGE_CONSUMER) -> Hello:
    address = pair.producer.address
    return Hello(PROTOCOL_VERSION, name, 1, address.engine_id, address.incarnation, "tcp", layout)


def forged(message: ControlMessage, **fields: Any) -> msgspec.Raw:
    """A message with some of its fields, or of its layout's, replaced by what no engine would put there."""
    values = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name, value in fields.items():
        (values if name in values else values["layout"])[name] = value
    return msgspec.Raw(msgspec.msgpack.encode(values))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_replicas": 0},
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 2**60},
        {"tp_size": 3, "num_replicas": 2},
        {"tp_size": 0},
        {"tp_size": 2**40},
        {"tp_rank": 7},
        {"tp_rank": -1},
        {"num_kv_heads": 0},
        {"num_kv_heads": -2},
        {"num_layers": -1},
        {"num_blocks": 0},
        {"head_dim": 0},
        {"dtype_size_bytes": 0},
        {"dtype": "x" * 10_000},
        {"model_fingerprint": "x" * 10_000},
        {"incarnation": -1},
        {"engine_id": ""},
        {"layout": None},
        {"protocol_version": "5"},
    ],
    ids=str,
)
def test_a_hello_with_a_field_out_of_its_range_ends_its_stream_and_nothing_else(fields: dict[str, Any]) -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        stream.send(forged(hello(pair), **fields))  # type: ignore[arg-type]  # what is sent is no message
        attacker.wait_closed()
        wait_dropped(pair.producer, {"malformed message": 1})


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x00" * 1000, b"\x91" * 100_000, encode(READY)[:-3]], ids=len)
def test_bytes_that_are_no_message_end_their_stream_and_nothing_else(frame: bytes) -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        stream.send(hello(pair))
        attacker.wait_for(Welcome)
        stream.send(msgspec.Raw(frame))  # type: ignore[arg-type]  # what is sent is no message
        attacker.wait_closed()


@pytest.mark.parametrize(
    "layout",
    [replace(LAYOUT, head_dim=16), replace(LAYOUT, block_size=3), replace(LAYOUT, num_kv_heads=1)],
)
def test_a_hello_of_another_model_is_refused_and_counted(layout: KVCacheLayout) -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        stream.send(hello(pair, layout))
        attacker.wait_for(Refused)
        attacker.wait_closed()
        wait_dropped(pair.producer, {"hello refused": 1})


@pytest.mark.parametrize(
    "message",
    [
        Welcome("rendezvous", LAYOUT),
        Refused("no"),
        Chunk("t-x", 0, 0, 1),
        ChunkSum("t-x", 0, 0, 0),
        Finished("t-x", 0, ProducerEnd.HANDED_OVER, 0, 7, ""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_consumer_that_speaks_as_a_producer_loses_its_link(message: ControlMessage) -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        stream.send(hello(pair))
        attacker.wait_for(Welcome)
        stream.send(message)
        attacker.wait_closed()
        wait_dropped(pair.producer, {"protocol violation": 1})


@pytest.mark.parametrize(
    "answers",
    [
        [Ready("t-a", 0, 0, 1)],
        [Cancel("t-a", 0)],
        [Chunk("t-a", 0, 0, 1)],
        [Welcome("", replace(LAYOUT, block_size=3))],
        [Welcome("", replace(LAYOUT, num_layers=1))],
        [Welcome("no rendezvous", LAYOUT)],
        [Welcome("127.0.0.1|99999999|zz", LAYOUT)],
        [Welcome("127.0.0.1|1|" + "00" * 16, LAYOUT)],
        [Ping(), Pong(), Refused("no")],
    ],
    ids=str,
)
def test_a_producer_that_answers_with_nonsense_costs_the_consumer_that_load_alone(
    answers: list[ControlMessage],
) -> None:
    class Producer(Attacker):
        def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
            super().on_message(stream, message)
            if isinstance(message, Hello):
                for answer in answers:
                    stream.send(answer)

    with connected_pair("loopback") as pair:
        pair.producer.control.hub.register("evil-0", Producer())  # type: ignore[attr-defined]  # a loopback control
        pair.consumer.reserve("a", EngineAddress("evil-0", 1, "evil-0"), TARGET, NUM_TOKENS)
        received = pair.consumer.wait_received("a")
        assert (received.outcome, received.num_valid_tokens) == (LoadOutcome.FAILED, 0)
        assert pair.hand_over("after", SOURCE, TARGET, NUM_TOKENS).outcome is LoadOutcome.LOADED


def test_a_second_hello_on_a_stream_is_refused_and_the_first_link_goes_on() -> None:
    with connected_pair("tcp") as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        stream, links = pair.consumer.streams()[0], pair.producer.streams()
        for _ in range(3):
            stream.send(hello(pair))
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)

        assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
        pair.producer.wait_finished_sending("a")
        assert pair.producer.streams() == links, "the stream has its first link"
        wait_dropped(pair.producer, {"second hello": 3})
        assert pair.producer.stats().num_links_lost == 0


def test_a_ready_that_was_wrong_before_its_request_came_costs_that_request_alone() -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        stream.send(hello(pair))
        attacker.wait_for(Welcome)
        stream.send(Ready("t-a", 0, 0, NUM_TOKENS + 1))
        stream.send(Ping())
        attacker.wait_for(Pong)
        pair.producer.produce("a", EngineAddress(STRANGE_CONSUMER, 1, ""), NUM_TOKENS)
        assert "expects 15 prompt tokens, the producer has 14" in pair.producer.wait_failed_sending("a")
        pair.producer.finish("a", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("a")
        attacker.wait_closed()


def test_a_cancel_of_another_consumers_transfer_changes_nothing() -> None:
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        pair.begin("a", TARGET, NUM_TOKENS)
        stream.send(hello(pair))
        attacker.wait_for(Welcome)
        stream.send(Cancel("t-a", 0))
        stream.send(Ping())
        attacker.wait_for(Pong)
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
        wait_dropped(pair.producer, {"cancel of another link's transfer": 1})


def test_two_requests_with_one_ticket_do_not_end_either_end() -> None:
    with connected_pair("tcp") as pair:
        pair.begin("a", TARGET, NUM_TOKENS)
        pair.producer.produce("b", pair.consumer.address, NUM_TOKENS, transfer_id="t-a")
        pair.consumer.reserve("b", pair.producer.address, (4, 5, 7, 9), NUM_TOKENS, transfer_id="t-a")
        assert pair.consumer.wait_received("b").outcome is LoadOutcome.FAILED
        pair.producer.finish("b", ProducerEnd.ABORTED)
        pair.producer.wait_finished_sending("b")
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
        pair.producer.wait_finished_sending("a")


def test_a_consumer_cannot_open_links_without_end() -> None:
    with connected_pair("tcp") as pair:
        attackers = []
        for _ in range(10):
            attacker = Attacker()
            dial_as(STRANGE_CONSUMER, pair.producer, attacker).send(hello(pair))
            attackers.append(attacker)
        for attacker in attackers:
            attacker.wait_for(Welcome, Refused)
        assert sum(isinstance(attacker.heard[0], Refused) for attacker in attackers) == 2


@pytest.mark.parametrize("claimed", [("decode-0", 1), (STRANGE_CONSUMER, 2)], ids=["other engine", "other incarnation"])
def test_a_hello_in_the_name_of_another_than_was_proven_is_refused(claimed: tuple[str, int]) -> None:
    """The real consumer's transfer, of which the attacker knows all, goes on."""
    with connected_pair("tcp") as pair, attack(pair, pair.producer) as (attacker, stream):
        pair.begin("a", TARGET, NUM_TOKENS)
        stream.send(msgspec.structs.replace(hello(pair), engine_id=claimed[0], incarnation=claimed[1]))
        attacker.wait_for(Refused)
        attacker.wait_closed()
        pair.producer.compute("a", SOURCE, 0, NUM_TOKENS)
        pair.producer.finish("a", ProducerEnd.HANDED_OVER, 7)
        assert pair.consumer.wait_received("a").outcome is LoadOutcome.LOADED
        pair.producer.wait_finished_sending("a")
        wait_dropped(pair.producer, {"hello refused": 1})
