"""A transport around another, whose links do to chunks what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor

from kv_transfer.sides import worker_side
from kv_transfer.transports.base import ComputeEvent, DataLink, PendingLink, Transport
from kv_transfer.trust.secret import KeySource


@dataclass(slots=True)
class Faults:
    """Called on a link's data thread. after_receive: with what has arrived."""

    before_send: Callable[[], None] = lambda: None
    before_receive: Callable[[], None] = lambda: None
    after_receive: Callable[[Sequence[Tensor]], None] = lambda blocks: None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every worker made from now on has such a transport."""
        make_transport = worker_side.make_transport

        def make(*args: object) -> Transport:
            transport: Transport = make_transport(*args)  # type: ignore[arg-type]  # as they were given
            return _FaultyTransport(transport, self)

        monkeypatch.setattr(worker_side, "make_transport", make)


class _FaultyLink:
    def __init__(self, link: DataLink, faults: Faults) -> None:
        self._link = link
        self._faults = faults
        self.is_cut, self.abort, self.close = link.is_cut, link.abort, link.close

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._faults.before_send()
        self._link.send(blocks, timeout_s, after)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        self._faults.before_receive()
        self._link.receive(blocks, timeout_s, after)
        self._faults.after_receive(blocks)


class _FaultyPendingLink:
    def __init__(self, pending: PendingLink, faults: Faults) -> None:
        self._pending = pending
        self._faults = faults
        self.rendezvous = pending.rendezvous

    def accept(self, timeout_s: float, opening: object = None) -> DataLink:
        del opening
        return _FaultyLink(self._pending.accept(timeout_s), self._faults)


class _FaultyTransport:
    def __init__(self, transport: Transport, faults: Faults) -> None:
        self._transport = transport
        self._faults = faults
        self.name = transport.name

    def listen(self, key: KeySource | None = None) -> PendingLink:
        return _FaultyPendingLink(self._transport.listen(key), self._faults)

    def connect(
        self, rendezvous: str, timeout_s: float, opening: object = None, key: KeySource | None = None
    ) -> DataLink:
        del opening
        return _FaultyLink(self._transport.connect(rendezvous, timeout_s, key=key), self._faults)
