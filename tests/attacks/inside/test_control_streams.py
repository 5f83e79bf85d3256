"""An end of a control stream serves on, whatever the other end, a member of the cluster, sends in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, ControlMessage, Hello, Welcome, decode, encode
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.params import EngineAddress
from tests.attacks.inside.message_fuzzer import MessageFuzzer
from tests.kv_transfer.connected_workers import LAYOUT, Pair, connected_pair

SOURCE = (17, 3, 29, 8)
TARGET = (2, 30, 11, 6)
NUM_TOKENS = 14
NUM_STREAMS = {"short": 40, "long": 1500}


class Quiet:
    """The other end of a stream, which does not listen."""

    def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
        """StreamEvents."""

    def on_malformed(self, stream: ControlStream, reason: str) -> None:
        """StreamEvents."""

    def on_closed(self, stream: ControlStream, reason: str) -> None:
        """StreamEvents."""


def known_to(pair: Pair, peer: str) -> dict[str, Callable[[random.Random], Any]]:
    """Return what a hostile member knows: who serves here, and names of transfers that are under way."""
    address = pair.producer.address
    return {
        "protocol_version": lambda draw: PROTOCOL_VERSION,
        "engine_id": lambda draw: draw.choice((peer, peer, peer, "decode-0")),
        "incarnation": lambda draw: 1,
        "peer_engine_id": lambda draw: address.engine_id,
        "peer_incarnation": lambda draw: address.incarnation,
        "transport": lambda draw: "loopback",
        "layout": lambda draw: asdict(replace(LAYOUT, block_size=draw.choice((4, 4, 4, 2, 8)))),
        "checksum": lambda draw: False,
        "is_on_gpu": lambda draw: False,
        "transfer_id": lambda draw: draw.choice(("t-a", "t-b", "t-victim", f"t-{peer}", "nothing")),
        "attempt": lambda draw: draw.choice((0, 0, 0, 1)),
        "num_prompt_tokens": lambda draw: draw.choice((NUM_TOKENS, NUM_TOKENS, 0, 2**31 - 1)),
    }


@contextmanager
def hostile_stream(pair: Pair, peer: str, events: Quiet) -> Iterator[ControlStream]:
    hub = pair.consumer.control.hub  # type: ignore[attr-defined]  # a loopback control
    stream = hub.control(EngineAddress(peer, 1, peer)).dial(pair.producer.address, events)
    try:
        yield stream
    finally:
        stream.close()


def say(stream: ControlStream, frames: list[bytes]) -> int:
    """Do as a control: decode, hand over, end the stream with the first that is no message. Returns how many were."""
    peer = stream.peer  # type: ignore[attr-defined]  # a loopback stream
    for number, frame in enumerate(frames):
        try:
            message = decode(frame)
        except MALFORMED as error:
            if peer is not None:
                peer.events.on_malformed(peer, str(error))
            return number
        stream.send(message)
    return len(frames)


@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_consumer", [True, False], ids=["to a producer", "to a consumer"])
def test_an_engine_outlives_every_control_message(size: str, is_consumer: bool) -> None:
    with connected_pair("loopback") as pair:
        num_messages = 0
        for seed in range(NUM_STREAMS[size]):
            peer = f"evil-{seed}"
            fuzzer = MessageFuzzer(ControlMessage, seed, known_to(pair, peer))
            frames = [fuzzer.make_hostile() for _ in range(12)]
            frames += random.Random(seed).choices(frames, k=4)  # replayed, and in another order
            if is_consumer:
                with hostile_stream(pair, peer, Quiet()) as stream:
                    hello = MessageFuzzer(Hello, seed, known_to(pair, peer)).make()
                    num_messages += say(stream, [msgspec.msgpack.encode(hello), *frames])
            else:
                num_messages += answer_as_producer(pair, peer, frames)
            if seed % 10 == 0:
                received = pair.hand_over(f"victim-{seed}", SOURCE, TARGET, NUM_TOKENS)
                assert received.outcome is LoadOutcome.LOADED, f"after {seed}"
        assert pair.consumer.cache[list(TARGET)].equal(pair.producer.cache[list(SOURCE)])
        assert num_messages >= NUM_STREAMS[size], "many of them are messages"


def answer_as_producer(pair: Pair, peer: str, frames: list[bytes]) -> int:
    """A consumer dials a hostile producer for a load, which ends in some way; nothing else does."""
    num_messages, hub = 0, pair.consumer.control.hub  # type: ignore[attr-defined]  # a loopback control

    class Producer(Quiet):
        def on_message(self, stream: ControlStream, message: ControlMessage) -> None:
            nonlocal num_messages
            if isinstance(message, Hello):
                # Joined, so that what follows comes to an open link.
                rendezvous, _ = hub.make_pipe()
                num_messages += say(stream, [encode(Welcome(rendezvous, LAYOUT)), *frames])
                stream.close()

    hub.register(peer, Producer())
    pair.consumer.reserve(peer, EngineAddress(peer, 1, peer), (4, 5, 7, 9), NUM_TOKENS)
    pair.consumer.wait_received(peer)
    return num_messages
