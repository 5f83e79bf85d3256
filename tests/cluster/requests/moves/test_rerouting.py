"""Requests that wait are looked at again and again, the last one of each queue, and go elsewhere one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.core.outputs.sent_work import SentWork
from cluster.requests.moves.rerouting import Rerouting
from cluster.routing.engine_connection import EngineKey
from cluster.routing.load_book import LoadBook
from tests.cluster.routing.cost_setup import Clock, engine

P0, P1, D0 = (engine(name) for name in ("prefill-0", "prefill-1", "decode-0"))


class Queues:
    """Prompts of a second each at engines, and a Rerouting that knows them. asked: ids in the order of the questions"""

    def __init__(self) -> None:
        self.book = LoadBook(Clock())
        self.looks: list[tuple[float, Callable[[], None]]] = []
        self.rerouting = Rerouting(self.book, lambda delay_s, look: self.looks.append((delay_s, look)))
        self.asked: list[str] = []
        self.moving: dict[str, EngineKey] = {}
        """The requests that will go elsewhere when they are asked, and where."""
        self._engines = {one.descriptor.key: one for one in (P0, P1, D0)}

    def send(self, request_id: str, key: EngineKey, prefill_s: float = 1.0) -> None:
        self.book.note_sent(self._engines[key].descriptor, request_id, SentWork(1000, prefill_s, 1000))
        self.rerouting.wait(request_id, key, lambda: self._ask(request_id, key))

    def _ask(self, request_id: str, key: EngineKey) -> bool:
        self.asked.append(request_id)
        target = self.moving.pop(request_id, None)
        if target is None:
            return False
        self.rerouting.forget(request_id)
        self.book.note_left(key, request_id, is_waiting=True)
        self.send(f"{request_id}+1", target)
        return True

    def look(self) -> list[str]:
        """Do what is due, and return the requests that were asked."""
        self.asked.clear()
        looks, self.looks = self.looks, []
        assert len(looks) <= 1, "one look is due at most"
        for _, look in looks:
            look()
        return self.asked


def keys() -> tuple[EngineKey, EngineKey, EngineKey]:
    return P0.descriptor.key, P1.descriptor.key, D0.descriptor.key


def test_the_last_prompt_of_each_queue_is_asked_that_of_the_longest_first() -> None:
    queues, (p0, p1, d0) = Queues(), keys()
    for request_id, key in (("a", p0), ("b", p1), ("c", p1), ("d", p0), ("e", p0), ("f", d0)):
        queues.send(request_id, key)
    assert queues.looks[0][0] == 0.1
    assert queues.look() == ["e", "c"], "f is computed at once"
    assert queues.look() == ["e", "c"], "there is a look as long as a request waits"


def test_when_one_goes_elsewhere_the_next_one_is_asked_at_once() -> None:
    queues, (p0, _, d0) = Queues(), keys()
    for request_id in "abcd":
        queues.send(request_id, p0)
    queues.moving = {"d": d0, "c": d0}
    assert queues.look() == ["d", "c", "c+1", "b"], "b and c+1 would begin at the same time"


def test_a_look_ends_after_some_that_go_elsewhere() -> None:
    queues, (p0, _, d0) = Queues(), keys()
    names = [f"r{number:02}" for number in range(20)]
    for request_id in names:
        queues.send(request_id, p0)
    queues.moving = dict.fromkeys(names, d0)
    assert queues.look() == names[:-9:-1]


@pytest.mark.parametrize(("prefill_s", "is_asked"), [(0.15, False), (0.25, True)])
def test_a_prompt_that_is_computed_soon_is_left_alone(prefill_s: float, is_asked: bool) -> None:
    queues, (p0, _, _) = Queues(), keys()
    queues.send("a", p0, prefill_s)
    queues.send("b", p0)
    assert queues.look() == ["b"] * is_asked


def test_who_is_forgotten_is_not_asked_and_without_requests_there_is_no_look() -> None:
    queues, (p0, _, _) = Queues(), keys()
    for request_id in "abc":
        queues.send(request_id, p0)
    queues.rerouting.forget("b")
    queues.rerouting.forget("unknown")
    assert queues.look() == ["c"]
    queues.rerouting.forget("c")
    queues.rerouting.forget("a")
    assert queues.look() == []
    assert queues.looks == []
    queues.send("d", p0)
    assert len(queues.looks) == 1


def test_only_the_longest_queues_are_looked_at() -> None:
    book, looks, asked = LoadBook(Clock()), list[Callable[[], None]](), list[str]()
    rerouting = Rerouting(book, lambda _, look: looks.append(look))

    def ask(request_id: str) -> bool:
        asked.append(request_id)
        return False

    for number in range(6):
        one = engine(f"prefill-{number}").descriptor
        for turn in range(number + 2):
            request_id = f"{number} {turn}"
            book.note_sent(one, request_id, SentWork(1000, 1.0, 1000))
            rerouting.wait(request_id, one.key, lambda request_id=request_id: ask(request_id))  # type: ignore[misc]
    looks.pop()()
    assert asked == ["5 6", "4 5", "3 4", "2 3"]
