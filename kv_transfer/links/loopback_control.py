"""Control streams and data links between engines of one process, without a socket."""

from __future__ import annotations

import itertools
import secrets
import threading

from kv_transfer.handoff.control_messages import ControlMessage
from kv_transfer.links.control_streams import ControlStream, StreamEvents
from kv_transfer.params import EngineAddress
from kv_transfer.transports.loopback import Pipe
from kv_transfer.trust.handshake import Party, Proven
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import Purpose, SessionKey
from kv_transfer.trust.tls import InternalTls


class LoopbackHub:
    """The registry in which the engines of one process find each other."""

    def __init__(self) -> None:
        self._events: dict[str, StreamEvents] = {}
        self._pipes: dict[str, Pipe] = {}
        self._pipe_numbers = itertools.count()
        self._lock = threading.Lock()

    def control(self, address: EngineAddress) -> LoopbackControl:
        """Return the control of one engine."""
        return LoopbackControl(self, address)

    def register(self, engine_id: str, events: StreamEvents) -> None:
        """Make an engine reachable under its id."""
        with self._lock:
            self._events[engine_id] = events

    def find(self, engine_id: str) -> StreamEvents | None:
        """Return the engine that listens under this name, if there is one."""
        with self._lock:
            return self._events.get(engine_id)

    def make_pipe(self) -> tuple[str, Pipe]:
        """Return a new data link, and the name under which the other end takes it."""
        with self._lock:
            name = str(next(self._pipe_numbers))
            pipe = self._pipes[name] = Pipe()
        return name, pipe

    def take_pipe(self, name: str) -> Pipe | None:
        """Remove and return the data link of this name; None if there is none, or it was taken before."""
        with self._lock:
            return self._pipes.pop(name, None)


class LoopbackControl:
    """One engine's control streams through a hub."""

    def __init__(self, hub: LoopbackHub, address: EngineAddress) -> None:
        self.hub = hub
        self._address = address
        self.refusals = Refusals()

    @property
    def tls(self) -> InternalTls | None:
        """Return None: nothing leaves the process, so nothing is encrypted."""
        return None

    def serve(self, events: StreamEvents) -> None:
        """Make this engine reachable."""
        self.hub.register(self._address.engine_id, events)

    def dial(self, peer: EngineAddress, events: StreamEvents) -> ControlStream:
        """Open a stream to another engine of this process."""
        near = _LoopbackStream(events)
        listener = self.hub.find(peer.engine_id)
        if listener is None:
            events.on_closed(near, f"no engine {peer.engine_id!r} in this process")
            return near
        far = _LoopbackStream(listener)
        near.peer, far.peer = far, near
        near.proven = far.proven = self._prove(peer)
        return near

    def _prove(self, peer: EngineAddress) -> Proven:
        """Return a proof for both ends without a handshake: the ends are in one process."""
        dialer = Party(self._address.engine_id, self._address.incarnation)
        acceptor = Party(peer.engine_id, peer.incarnation)
        return Proven(Purpose.CONTROL, dialer, acceptor, SessionKey(secrets.token_bytes(32)))


class _LoopbackStream:
    """One end of a stream. Messages are handed over on the sender's thread. events: takes those for this end."""

    def __init__(self, events: StreamEvents) -> None:
        self.events = events
        self.peer: _LoopbackStream | None = None
        self.proven: Proven | None = None

    def send(self, message: ControlMessage) -> None:
        peer = self.peer
        if peer is not None:
            peer.events.on_message(peer, message)

    def close(self) -> None:
        peer, self.peer = self.peer, None
        if peer is None:
            return
        peer.peer = None
        peer.events.on_closed(peer, "closed by the peer")
        self.events.on_closed(self, "closed here")
