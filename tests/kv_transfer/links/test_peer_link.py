"""The messages and state of a link in each of its states, and what two ends may disagree on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Cancel, ControlMessage, Hello, Ping
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.links.peer_link import LinkState, PeerLink, find_disagreement
from kv_transfer.links.send_receive_thread import DataThread
from kv_transfer.transports.loopback import Pipe
from kv_transfer.trust.handshake import Proven
from tests.kv_transfer.connected_workers import LAYOUT

HELLO = Hello(PROTOCOL_VERSION, "decode-0", 5, "prefill-0", 3, "tcp", LAYOUT, checksum=False)
FACTS = PairingFacts.of_rank(LAYOUT, "tcp", checksum=False, is_on_gpu=False)


class Stream:
    """Keeps what is said."""

    proven: Proven | None = None

    def __init__(self) -> None:
        self.said: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> None:
        self.said.append(message)

    def close(self) -> None:
        raise AssertionError("not here")


class NoEvents:
    def on_chunk_moved(self, job: object) -> None:
        raise AssertionError("nothing is moved")

    def on_dead(self, reason: str) -> None:
        assert reason == "closed"


def disagreement(hello: Hello) -> str | None:
    return find_disagreement(hello, "prefill-0", 3, LAYOUT, FACTS)


def test_like_ends_agree() -> None:
    assert disagreement(HELLO) is None


def test_the_number_of_blocks_is_each_ends_own_affair() -> None:
    assert disagreement(msgspec.structs.replace(HELLO, layout=replace(LAYOUT, num_blocks=7))) is None


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (msgspec.structs.replace(HELLO, protocol_version=99), f"protocol version: 99 {{}}, {PROTOCOL_VERSION} {{}}"),
        (msgspec.structs.replace(HELLO, peer_engine_id="prefill-1"), "engine: 'prefill-1' {}, 'prefill-0' {}"),
        (msgspec.structs.replace(HELLO, peer_incarnation=2), "incarnation: 2 {}, 3 {}"),
        (msgspec.structs.replace(HELLO, transport="loopback"), "transport: 'loopback' {}, 'tcp' {}"),
        (msgspec.structs.replace(HELLO, checksum=True), "checksum: True {}, False {}"),
        (
            msgspec.structs.replace(HELLO, layout=replace(LAYOUT, model_fingerprint="b")),
            "model: 'b' {}, 'model-a' {}",
        ),
        (msgspec.structs.replace(HELLO, layout=replace(LAYOUT, dtype="float16")), "dtype: 'float16' {}, 'float32' {}"),
        (
            msgspec.structs.replace(HELLO, layout=replace(LAYOUT, block_size=6)),
            "block_size, not a multiple: 6 {}, 4 {}",
        ),
        (
            msgspec.structs.replace(HELLO, layout=replace(LAYOUT, num_kv_heads=1)),
            "num_kv_heads of all ranks: 1 {}, 2 {}",
        ),
        (
            msgspec.structs.replace(HELLO, layout=replace(LAYOUT, num_kv_heads=2, tp_size=2)),
            "num_kv_heads of all ranks: 4 {}, 2 {}",
        ),
        (msgspec.structs.replace(HELLO, layout=replace(LAYOUT, num_layers=3)), "num_layers: 3 {}, 2 {}"),
        (msgspec.structs.replace(HELLO, layout=replace(LAYOUT, head_dim=16)), "head_dim: 16 {}, 8 {}"),
    ],
)
def test_a_disagreement_names_both_values(hello: Hello, says: str) -> None:
    assert disagreement(hello) == says.format("at the consumer", "at the producer")


def test_every_disagreement_is_named() -> None:
    hello = msgspec.structs.replace(HELLO, peer_incarnation=2, layout=replace(LAYOUT, block_size=6, head_dim=16))
    assert disagreement(hello) == (
        "incarnation: 2 at the consumer, 3 at the producer; head_dim: 16 at the consumer, 8 at the producer; "
        "block_size, not a multiple: 6 at the consumer, 4 at the producer"
    )


def test_block_sizes_and_ranks_may_differ_while_they_have_pieces_and_heads_in_common() -> None:
    half = replace(LAYOUT, num_kv_heads=1, tp_size=2, tp_rank=1)
    for layout in (replace(LAYOUT, block_size=8), replace(LAYOUT, block_size=2), half):
        assert disagreement(msgspec.structs.replace(HELLO, layout=layout)) is None
    hello = msgspec.structs.replace(HELLO, layout=half)
    other_half = replace(half, tp_rank=0)
    assert find_disagreement(hello, "prefill-0", 3, other_half, FACTS) == (
        "KV heads of the ranks: range(1, 2) at the consumer, range(0, 1) at the producer"
    )


def test_what_is_said_before_a_link_is_open_goes_out_in_order_and_what_is_said_to_a_closing_one_does_not() -> None:
    stream = Stream()
    link = PeerLink(stream, False, ("prefill-0", 3), deadline_s=1.0)
    first, second, third, lost = (Cancel(name, 0) for name in ("first", "second", "third", "lost"))
    link.send(first)
    link.send(second)
    assert stream.said == []
    data = DataThread("test-link", lambda opening: Pipe(), NoEvents(), is_sender=False, chunk_timeout_s=1.0)
    link.open(data, now_s=4.0)
    link.send(third)
    assert stream.said == [first, second, third]
    assert link.deadline_s is None, "the handshake is over"
    assert link.heard_s == 4.0
    link.state = LinkState.CLOSING
    link.send(lost)
    assert stream.said == [first, second, third]
    data.abort()
    assert data.join(60.0)


@pytest.mark.parametrize("state", list(LinkState))
def test_a_new_transfer_uses_only_a_link_that_is_up_or_coming_up(state: LinkState) -> None:
    link = PeerLink(Stream(), False, ("prefill-0", 3), None, state)
    assert link.is_usable == (state in {LinkState.CONNECTING, LinkState.OPEN})


def test_a_round_trip_begins_with_the_first_ping_without_answer() -> None:
    stream = Stream()
    link = PeerLink(stream, True, ("decode-0", 5), None, LinkState.OPEN)
    link.ping(10.0)
    link.ping(12.0)
    assert link.take_round_trip_s(12.5) == 2.5
    assert link.take_round_trip_s(13.0) is None, "a second Pong answers nothing"
    assert stream.said == [Ping(), Ping()]
