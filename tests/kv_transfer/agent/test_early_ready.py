"""READY before its request, and requests that end before their READY."""

from __future__ import annotations

from kv_transfer.agent.early_ready import EarlyReadies
from kv_transfer.handoff.control_messages import ControlMessage, Ready
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.trust.handshake import Proven


class Stream:
    """Says nothing."""

    proven: Proven | None = None

    def send(self, message: ControlMessage) -> None:
        raise AssertionError(f"kept messages are not answered here: {message}")

    def close(self) -> None:
        raise AssertionError("links are not closed here")


def new_link() -> PeerLink:
    return PeerLink(Stream(), True, ("decode-0", 1), None, LinkState.OPEN)


def ready(transfer_id: str) -> Ready:
    return Ready(transfer_id, 0, 0, 10)


def test_an_early_ready_is_taken_once() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    assert kept.put(link, ready("a"), 0.0)
    assert kept.take("b") is None
    assert kept.take("a") == (link, ready("a"))
    assert kept.take("a") is None
    assert kept.next_deadline() is None


def test_early_messages_expire_in_order_and_once() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    assert kept.next_deadline() is None
    for transfer_id, now_s in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        assert kept.put(link, ready(transfer_id), now_s)
    assert kept.next_deadline() == 5.0
    assert kept.expire(4.9) == []
    assert kept.expire(6.0) == [(link, ready("a")), (link, ready("b"))]
    assert kept.next_deadline() == 7.0
    assert kept.take("a") is None
    assert kept.take("c") == (link, ready("c"))


def test_nobody_answers_on_a_dead_link() -> None:
    kept, dead, alive = EarlyReadies(5.0), new_link(), new_link()
    kept.put(dead, ready("a"), 0.0)
    kept.put(alive, ready("b"), 0.0)
    dead.state = LinkState.DEAD
    assert kept.expire(5.0) == [(alive, ready("b"))]
    assert kept.next_deadline() is None


def test_ready_for_a_transfer_that_has_ended_is_refused_once() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    kept.refuse_later("a")
    assert not kept.put(link, ready("a"), 0.0)
    assert kept.next_deadline() is None
    assert kept.put(link, ready("a"), 0.0)


def test_so_many_messages_are_kept_and_no_more() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    assert all(kept.put(link, ready(str(i)), 0.0) for i in range(4096))
    assert not kept.put(link, ready("one more"), 0.0)
    assert kept.take("0") is not None
    assert kept.put(link, ready("one more"), 0.0)


def test_the_oldest_ended_transfer_is_forgotten_first() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    for i in range(4097):
        kept.refuse_later(str(i))
    assert kept.put(link, ready("0"), 0.0)
    assert not kept.put(link, ready("1"), 0.0)


def test_a_later_attempt_takes_an_earlier_ones_place_and_never_the_other_way_round() -> None:
    kept, link = EarlyReadies(5.0), new_link()
    earlier, later = Ready("a", 1, 0, 10), Ready("a", 2, 0, 10)
    kept.put(link, earlier, 0.0)
    kept.put(link, ready("b"), 1.0)
    assert kept.put(link, later, 2.0)
    assert not kept.put(link, earlier, 3.0)
    assert kept.expire(6.5) == [(link, ready("b"))]
    assert kept.take("a") == (link, later)
