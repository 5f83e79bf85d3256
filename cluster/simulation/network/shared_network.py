"""The network between simulated engines: messages take a latency, and transfers share the engines' interfaces.

An engine sends with LinkSpec.bytes_per_s at most, and receives with as much. A flow gets the smaller of two equal
shares: of its sender's interface among the flows that it sends, and of its receiver's among those that it receives.
What a flow cannot use of one interface, since the other one is narrower, nobody else gets: rates are a little too low
where flows of one sender meet different crowds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.routing.engine_connection import EngineKey
from cluster.simulation.cluster_spec import LinkSpec
from cluster.simulation.event_queue import EventQueue


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes that move from one engine to another. version: grows each time the rate changes"""

    sender: EngineKey
    receiver: EngineKey
    num_left_bytes: float
    on_sent: Callable[[], None]
    rate: float = 0.0
    since_s: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Interface:
    """The flows of one engine. Keys are the flows' numbers, so that their order is that in which they began."""

    sent: list[Flow] = field(default_factory=list)
    received: list[Flow] = field(default_factory=list)


class SharedNetwork:
    """Moves bytes and messages between engines that are there and not cut off from each other."""

    def __init__(self, links: LinkSpec, events: EventQueue) -> None:
        self._links = links
        self._events = events
        self._interfaces: dict[EngineKey, _Interface] = {}
        self._apart: list[frozenset[str]] = []
        self._held: list[tuple[EngineKey, EngineKey, Callable[[], None]]] = []
        """Messages that wait for the end of a cut, in the order in which they would have arrived."""

    @property
    def latency_s(self) -> float:
        """The time that a message takes one way."""
        return self._links.latency_s

    def join(self, engine: EngineKey) -> None:
        """Connect an engine."""
        self._interfaces[engine] = _Interface()

    def leave(self, engine: EngineKey) -> None:
        """Disconnect an engine that has died: what it sends and receives ends at once."""
        gone = self._interfaces.pop(engine)
        for flow in (*gone.sent, *gone.received):
            self._remove(flow)

    def cut(self, engine_ids: frozenset[str]) -> None:
        """Cut these engines off from all others: messages wait, and flows stand still."""
        self._apart.append(engine_ids)
        self._share(self._all_flows())

    def mend(self, engine_ids: frozenset[str]) -> None:
        """Undo a cut: messages come that no lost link has taken with it."""
        self._apart.remove(engine_ids)
        held, self._held = self._held, []
        for sender, receiver, on_arrival in held:
            self.send(sender, receiver, on_arrival)
        self._share(self._all_flows())

    def lose(self, engine_ids: frozenset[str]) -> None:
        """Drop the messages that wait between these engines and others: their links are lost."""
        self._held = [one for one in self._held if (one[0][0] in engine_ids) == (one[1][0] in engine_ids)]

    def is_cut(self, one: EngineKey, other: EngineKey) -> bool:
        """Whether two engines cannot reach each other."""
        return any((one[0] in group) != (other[0] in group) for group in self._apart)

    def reaches(self, one: EngineKey, other: EngineKey) -> bool:
        """Whether a message of one engine gets to another one."""
        return self.has(one) and self.has(other) and not (self._apart and self.is_cut(one, other))

    def has(self, engine: EngineKey) -> bool:
        """Whether an engine is connected."""
        return engine in self._interfaces

    def send(self, sender: EngineKey, receiver: EngineKey, on_arrival: Callable[[], None]) -> None:
        """Send a message; it is lost if the receiver is not there when it is sent, or when it arrives."""
        if self.has(sender) and self.has(receiver):
            self._events.at(self._events.now_s + self._links.latency_s, self._arrive, sender, receiver, on_arrival)

    def _arrive(self, sender: EngineKey, receiver: EngineKey, on_arrival: Callable[[], None]) -> None:
        if self.reaches(sender, receiver):
            on_arrival()
        elif self.has(sender) and self.has(receiver):
            self._held.append((sender, receiver, on_arrival))

    def move(self, sender: EngineKey, receiver: EngineKey, num_bytes: int, on_sent: Callable[[], None]) -> Flow:
        """Begin to move bytes. on_sent: called when the last one has left"""
        flow = Flow(sender, receiver, num_bytes, on_sent, since_s=self._events.now_s)
        if sender in self._interfaces and receiver in self._interfaces:
            self._interfaces[sender].sent.append(flow)
            self._interfaces[receiver].received.append(flow)
            self._share(self._neighbours(flow))
        return flow

    def stop(self, flow: Flow) -> None:
        """End a flow before it is through."""
        self._remove(flow)

    def _remove(self, flow: Flow) -> None:
        flow.version += 1
        neighbours = self._neighbours(flow)
        for key, is_sent in ((flow.sender, True), (flow.receiver, False)):
            if (interface := self._interfaces.get(key)) is not None:
                flows = interface.sent if is_sent else interface.received
                if flow in flows:
                    flows.remove(flow)
        self._share([other for other in neighbours if other is not flow])

    def _all_flows(self) -> list[Flow]:
        return [flow for interface in self._interfaces.values() for flow in interface.sent]

    def _neighbours(self, flow: Flow) -> list[Flow]:
        """Return the flows whose rates depend on this one, itself included."""
        sender, receiver = self._interfaces.get(flow.sender), self._interfaces.get(flow.receiver)
        found = [] if sender is None else list(sender.sent)
        found += [] if receiver is None else [other for other in receiver.received if other.sender != flow.sender]
        return found

    def _share(self, flows: list[Flow]) -> None:
        """Give these flows the rates that they have now."""
        now_s = self._events.now_s
        for flow in flows:
            rate = self._rate(flow)
            if rate == flow.rate and flow.version:
                continue
            flow.num_left_bytes -= flow.rate * (now_s - flow.since_s)
            flow.rate, flow.since_s = rate, now_s
            flow.version += 1
            if rate > 0:
                end_s = now_s + max(flow.num_left_bytes, 0.0) / rate
                self._events.at(end_s, self._end, flow, flow.version)

    def _rate(self, flow: Flow) -> float:
        sender, receiver = self._interfaces.get(flow.sender), self._interfaces.get(flow.receiver)
        if sender is None or receiver is None or (self._apart and self.is_cut(flow.sender, flow.receiver)):
            return 0.0
        return self._links.bytes_per_s / max(len(sender.sent), len(receiver.received), 1)

    def _end(self, flow: Flow, version: int) -> None:
        if flow.version == version:
            self._remove(flow)
            flow.on_sent()
