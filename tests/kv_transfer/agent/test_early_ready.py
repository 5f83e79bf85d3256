"""READY before its request, and requests that end before their READY."""

from __future__ import annotations

from kv_transfer.agent.early_ready import ParkedMessages
from kv_transfer.handoff.control_messages import ControlMessage, Ready
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.trust.handshake import Proven


class Stream:
    """Says nothing."""

    proven: Proven | None = None

    def send(self, message: ControlMessage) -> None:
        raise AssertionError(f"parked messages are not answered here: {message}")

    def close(self) -> None:
        raise AssertionError("links are not closed here")


def new_link() -> PeerLink:
    return PeerLink(Stream(), True, ("decode-0", 1), None, LinkState.OPEN)


def ready(transfer_id: str) -> Ready:
    return Ready(transfer_id, 0, 0, 10)


def test_a_parked_ready_is_taken_once() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    assert parked.put(link, ready("a"), 0.0)
    assert parked.take("b") is None
    assert parked.take("a") == (link, ready("a"))
    assert parked.take("a") is None
    assert parked.next_deadline() is None


def test_parked_messages_expire_in_order_and_once() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    assert parked.next_deadline() is None
    for transfer_id, now_s in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        assert parked.put(link, ready(transfer_id), now_s)
    assert parked.next_deadline() == 5.0
    assert parked.expire(4.9) == []
    assert parked.expire(6.0) == [(link, ready("a")), (link, ready("b"))]
    assert parked.next_deadline() == 7.0
    assert parked.take("a") is None
    assert parked.take("c") == (link, ready("c"))


def test_nobody_answers_on_a_dead_link() -> None:
    parked, dead, alive = ParkedMessages(5.0), new_link(), new_link()
    parked.put(dead, ready("a"), 0.0)
    parked.put(alive, ready("b"), 0.0)
    dead.state = LinkState.DEAD
    assert parked.expire(5.0) == [(alive, ready("b"))]
    assert parked.next_deadline() is None


def test_ready_for_a_transfer_that_has_ended_is_refused_once() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    parked.refuse_later("a")
    assert not parked.put(link, ready("a"), 0.0)
    assert parked.next_deadline() is None
    assert parked.put(link, ready("a"), 0.0)


def test_so_many_messages_are_kept_and_no_more() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    assert all(parked.put(link, ready(str(i)), 0.0) for i in range(4096))
    assert not parked.put(link, ready("one more"), 0.0)
    assert parked.take("0") is not None
    assert parked.put(link, ready("one more"), 0.0)


def test_the_oldest_ended_transfer_is_forgotten_first() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    for i in range(4097):
        parked.refuse_later(str(i))
    assert parked.put(link, ready("0"), 0.0)
    assert not parked.put(link, ready("1"), 0.0)


def test_a_later_attempt_takes_an_earlier_ones_place_and_never_the_other_way_round() -> None:
    parked, link = ParkedMessages(5.0), new_link()
    earlier, later = Ready("a", 1, 0, 10), Ready("a", 2, 0, 10)
    parked.put(link, earlier, 0.0)
    parked.put(link, ready("b"), 1.0)
    assert parked.put(link, later, 2.0)
    assert not parked.put(link, earlier, 3.0)
    assert parked.expire(6.5) == [(link, ready("b"))]
    assert parked.take("a") == (link, later)
