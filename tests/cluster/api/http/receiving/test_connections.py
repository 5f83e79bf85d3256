"""The choice of the connection that ends when there is one too many."""

from __future__ import annotations

import pytest

from cluster.api.http.receiving.connections import Connections


class FakeConnection:
    def __init__(self) -> None:
        self.has_ended = False

    def end(self) -> None:
        self.has_ended = True


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_one_ends_that_has_waited_longest_for_a_request() -> None:
    connections = Connections(3, FakeClock())
    first, second, third, fourth, fifth = (FakeConnection() for _ in range(5))
    for connection in (first, second, third):
        assert connections.add(connection)
    connections.set_busy(first)
    assert connections.add(fourth)
    assert second.has_ended
    connections.set_busy(third)
    connections.set_spare(first)
    assert connections.add(fifth)
    assert (fourth.has_ended, first.has_ended, len(connections)) == (True, False, 3)


def test_if_all_have_requests_the_new_one_has_no_room(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    connections = Connections(1, clock)
    first = FakeConnection()
    connections.add(first)
    connections.set_busy(first)
    for clock.now_s in (1.0, 2.0, 70.0):
        assert not connections.add(FakeConnection())
    assert [record.message for record in caplog.records] == [
        "the limit on HTTP connections (ingress.http.max_connections) is reached: new connections are refused"
    ] * 2
    connections.discard(first)
    assert connections.add(FakeConnection())


def test_a_connection_that_has_ended_is_not_spare() -> None:
    connections = Connections(1, FakeClock())
    first, second = FakeConnection(), FakeConnection()
    connections.add(first)
    connections.discard(first)
    connections.set_spare(first)
    assert connections.add(second)
    connections.set_busy(second)
    assert not connections.add(FakeConnection())
    assert not first.has_ended
