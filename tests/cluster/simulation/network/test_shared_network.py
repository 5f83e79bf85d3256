from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.simulation.cluster_spec import LinkSpec
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.network.shared_network import SharedNetwork

A, B, C = ("a", 1), ("b", 1), ("c", 1)


class Wires:
    """A network of three engines with 100 bytes per second and 1 s of latency, and when what has happened."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.network = SharedNetwork(LinkSpec(bytes_per_s=100.0, latency_s=1.0), self.events)
        self.seen: dict[str, float] = {}
        for engine in (A, B, C):
            self.network.join(engine)

    def note(self, name: str) -> Callable[[], None]:
        def note() -> None:
            self.seen[name] = self.events.now_s

        return note

    def run(self) -> dict[str, float]:
        self.events.run(100.0, lambda: False)
        return self.seen


def test_a_message_takes_the_latency() -> None:
    wires = Wires()
    wires.network.send(A, B, wires.note("message"))
    assert wires.run() == {"message": 1.0}


def test_a_flow_alone_has_the_whole_interface() -> None:
    wires = Wires()
    wires.network.move(A, B, 200, wires.note("flow"))
    assert wires.run() == {"flow": 2.0}


def test_flows_of_one_sender_share_its_interface() -> None:
    wires = Wires()
    wires.network.move(A, B, 100, wires.note("short"))
    wires.network.move(A, C, 200, wires.note("long"))
    # Both have 50 bytes/s until 2 s; then the longer one has 100 bytes left and the interface alone.
    assert wires.run() == pytest.approx({"short": 2.0, "long": 3.0})


def test_flows_to_one_receiver_share_its_interface() -> None:
    wires = Wires()
    wires.network.move(A, C, 100, wires.note("first"))

    def begin() -> None:
        wires.network.move(B, C, 100, wires.note("second"))

    wires.events.at(0.5, begin)
    # 50 bytes of the first flow are left at 0.5 s, and take 1 s of half the interface.
    assert wires.run() == pytest.approx({"first": 1.5, "second": 2.0})


def test_flows_of_different_engines_do_not_meet() -> None:
    wires = Wires()
    wires.network.move(A, B, 100, wires.note("there"))
    wires.network.move(B, A, 100, wires.note("back"))
    assert wires.run() == {"there": 1.0, "back": 1.0}


def test_what_an_engine_sends_and_receives_ends_with_it() -> None:
    wires = Wires()
    wires.network.move(A, B, 100, wires.note("to the dead"))
    wires.network.move(A, C, 100, wires.note("to the living"))
    wires.network.send(B, A, wires.note("message of the dead"))
    wires.events.at(0.5, wires.network.leave, B)
    # 75 bytes are left at 0.5 s.
    assert wires.run() == {"to the living": 1.25}


def test_a_cut_lets_flows_stand_still_and_messages_wait() -> None:
    wires = Wires()
    group = frozenset({"a"})
    wires.network.move(A, B, 100, wires.note("across"))
    wires.network.move(B, C, 100, wires.note("within"))
    wires.events.at(0.5, wires.network.cut, group)
    wires.events.at(0.6, wires.network.send, A, B, wires.note("message"))
    wires.events.at(2.5, wires.network.mend, group)
    assert wires.run() == pytest.approx({"within": 1.0, "across": 3.0, "message": 3.5})
    assert wires.network.reaches(A, B)


def test_messages_of_lost_links_do_not_come() -> None:
    wires = Wires()
    group = frozenset({"a"})
    wires.events.at(0.5, wires.network.cut, group)
    wires.events.at(0.6, wires.network.send, A, B, wires.note("across"))
    wires.events.at(2.0, wires.network.lose, group)
    wires.events.at(2.5, wires.network.mend, group)
    assert wires.run() == {}
