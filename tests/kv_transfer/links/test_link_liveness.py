"""When quiet links are asked, and when they are given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kv_transfer.handoff.control_messages import ControlMessage, Ping
from kv_transfer.links.link_liveness import Lifeless, LinkLiveness
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.transports.loopback import Pipe
from kv_transfer.trust.handshake import Proven

TIMEOUT_S = 8.0
BEAT_S = 2.0
PATIENT_S = 60.0
SILENT = "the peer has been silent for 8 s"


class Stream:
    proven: Proven | None = None

    def __init__(self) -> None:
        self.said: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> None:
        self.said.append(message)

    def close(self) -> None:
        pass


class Events:
    def __init__(self) -> None:
        self.has_moved = threading.Event()

    def on_chunk_moved(self, job: ChunkJob) -> None:
        self.has_moved.set()

    def on_dead(self, reason: str) -> None:
        pass


def link(state: LinkState = LinkState.OPEN, heard_s: float = 100.0) -> tuple[PeerLink, Stream]:
    stream = Stream()
    made = PeerLink(stream, False, ("prefill-0", 3), deadline_s=None, state=state, heard_s=heard_s)
    return made, stream


def pulse_from(start_s: float, *links: PeerLink) -> Callable[[float], list[Lifeless]]:
    """Beats of a pulse that has beaten at start_s."""
    pulse = LinkLiveness(TIMEOUT_S)
    assert pulse.beat(links, start_s) == []
    return lambda now_s: pulse.beat(links, now_s)


def test_a_quiet_peer_is_asked_at_each_beat_until_it_is_given_up() -> None:
    quiet, stream = link()
    beat = pulse_from(100.0, quiet)
    found = [beat(100.0 + number * BEAT_S) for number in (1, 2, 3)]
    assert (found, stream.said) == ([[], [], []], [Ping()] * 3)
    assert beat(108.0) == [Lifeless(quiet, SILENT)]


def test_a_peer_that_speaks_is_not_asked() -> None:
    talking, stream = link()
    beat = pulse_from(100.0, talking)
    for number in range(1, 20):
        talking.heard_s = 100.0 + number * BEAT_S - 0.1
        assert beat(100.0 + number * BEAT_S) == []
    assert stream.said == []


def test_between_two_beats_nothing_happens() -> None:
    quiet, stream = link(heard_s=0.0)
    beat = pulse_from(100.0, quiet)
    assert beat(101.9) == []
    assert stream.said == [Ping()]


def test_whoever_was_stopped_himself_gives_each_peer_one_more_beat() -> None:
    quiet, stream = link()
    answering, _ = link()
    beat = pulse_from(100.0, quiet, answering)
    assert beat(160.0) == [], "what they have said may lie unread"
    assert stream.said == [Ping()]
    answering.heard_s = 160.1
    assert beat(162.0) == [Lifeless(quiet, SILENT)]


def test_a_link_that_comes_up_or_goes_down_has_deadlines_of_its_own() -> None:
    links = [link(state, heard_s=0.0) for state in LinkState if state is not LinkState.OPEN]
    pulse = LinkLiveness(TIMEOUT_S)
    for now_s in (100.0, 102.0, 104.0):
        assert pulse.beat([one for one, _ in links], now_s) == []
    assert all(stream.said == [] for _, stream in links)
    assert pulse.next_deadline([one for one, _ in links]) is None


def test_the_next_beat_is_due_while_a_link_is_open() -> None:
    opened, _ = link()
    pulse = LinkLiveness(TIMEOUT_S)
    pulse.beat([opened], 100.0)
    assert pulse.next_deadline([opened]) == 102.0


def test_a_data_connection_that_is_gone_is_noticed_although_the_peer_speaks() -> None:
    talking, _ = link()
    pipe, events = Pipe(), Events()
    opened = talking.data = DataThread(
        "test-link", lambda opening: pipe, events, is_sender=True, chunk_timeout_s=PATIENT_S
    )
    opened.put(ChunkJob("t", ()))
    pipe.receive((), timeout_s=PATIENT_S)
    assert events.has_moved.wait(PATIENT_S)
    beat = pulse_from(100.0, talking)
    pipe.abort()
    limit_s = time.monotonic() + PATIENT_S
    while not opened.is_cut:  # It has told of the chunk before it waits for the next one.
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    talking.heard_s = 101.9
    found = beat(102.0)
    opened.abort()
    assert opened.join(PATIENT_S)
    assert found == [Lifeless(talking, "the data connection broke while nothing moved on it")]
