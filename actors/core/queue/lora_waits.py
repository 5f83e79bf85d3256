"""How long an adapter waits for a slot: adapters of the batch give way to one that has waited for too long.

Without this, requests for max_loras adapters that never stop coming keep those for another one out for ever. A wait
begins when a request is set aside because its adapter has no slot; the adapter is *overdue* once max_lora_wait_s have
passed without one. For each overdue adapter that finds no free slot, the adapter that has been in the batch longest
gives way: none of its requests joins any more, so those that run end, and the slot is free. Then it waits in its turn.

Held back are only requests that come after the first overdue one (by arrival, or by the policy's order), so whoever is
held back waits for finitely many others. They are
- requests of adapters that give way, and of others that would take a slot that is kept for an overdue adapter;
- loads: a request whose load is over holds blocks that an overdue one may need, so it always may take a free slot; and
  there must not be more and more of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from actors.config import SchedulerConfig
from actors.core.queue.request_queue import RequestQueue, order_of
from actors.core.requests.request import Request
from actors.core.requests.running_rows import RunningRows

_Position = tuple[float, float, str]


@dataclass(slots=True)
class _Wait:
    """The requests of an adapter that have been set aside, and since when the adapter has had no slot."""

    since_s: float
    requests: dict[str, Request] = field(default_factory=dict)


class LoraWaits:
    """Decides which adapters are overdue, which give way to them, and which loads are held back meanwhile.

    Requests without an adapter are never held back, and cost nothing here.
    """

    def __init__(self, config: SchedulerConfig, rows: RunningRows) -> None:
        self._config = config
        self._rows = rows
        self._waits: dict[str, _Wait] = {}
        self._overdue: list[str] = []
        self._first: _Position | None = None
        self.held_loads: dict[str, tuple[Request, RequestQueue]] = {}

    # -- waits ---------------------------------------------------------------------------------------------------

    def begin(self, request: Request, now_s: float) -> None:
        """Note that a request has no slot. now_s: the engine's clock"""
        assert request.lora_name is not None
        self._waits.setdefault(request.lora_name, _Wait(now_s)).requests[request.request_id] = request

    def end(self, request: Request) -> None:
        """Note that a request runs, has ended, or waits for something else than a slot."""
        if request.lora_name is None:
            return
        self.held_loads.pop(request.request_id, None)
        wait = self._waits.get(request.lora_name)
        if wait is not None and wait.requests.pop(request.request_id, None) is not None and not wait.requests:
            del self._waits[request.lora_name]

    def since(self, lora_name: str) -> float:
        """Return the engine's clock when the adapter's wait began; it has one."""
        return self._waits[lora_name].since_s

    def look(self, now_s: float) -> None:
        """Find out, before a step is put together, which adapters are overdue."""
        if not self._waits:
            self._overdue, self._first = [], None
            return
        for lora_name in self._waits.keys() & self._rows.num_by_lora.keys():
            # While an adapter gives way its requests wait, but it has its slot.
            self._waits[lora_name].since_s = now_s
        longest = now_s - self._config.max_lora_wait_s
        self._overdue = [lora_name for lora_name, wait in self._waits.items() if wait.since_s <= longest]
        late = (request for lora_name in self._overdue for request in self._waits[lora_name].requests.values())
        self._first = min(map(self._position_of, late), default=None)

    # -- questions -----------------------------------------------------------------------------------------------

    def has_slot(self, lora_name: str) -> bool:
        """Whether the batch has, or can take, an adapter."""
        active = self._rows.num_by_lora
        return lora_name in active or len(active) < self._config.max_loras

    def may_join(self, request: Request) -> bool:
        """Whether a waiting request without blocks may join the batch, as far as adapters go."""
        lora_name = request.lora_name
        if lora_name is None:
            return True
        if not self.has_slot(lora_name):
            return False
        if not self._comes_after(request) or lora_name in self._overdue:
            return True
        active = self._rows.num_by_lora
        num_waiting = sum(name not in active for name in self._overdue)
        num_free = self._config.max_loras - len(active)
        if lora_name not in active:
            return num_waiting < num_free
        return lora_name not in islice(active, max(0, num_waiting - num_free))

    def may_load(self, request: Request) -> bool:
        """Whether a request's load may begin. It takes no slot before it is over."""
        return request.lora_name is None or not self._comes_after(request)

    def _comes_after(self, request: Request) -> bool:
        return self._first is not None and self._position_of(request) > self._first

    def _position_of(self, request: Request) -> _Position:
        if self._config.policy == "priority":
            return order_of(request, self._config)
        return (0.0, request.arrival_time, "")

    # -- loads ---------------------------------------------------------------------------------------------------

    def hold_load(self, request: Request, queue: RequestQueue) -> None:
        """Keep a request whose load may not begin, out of its queue."""
        queue.remove_request(request)
        self.held_loads[request.request_id] = (request, queue)

    def bring_back_loads(self) -> None:
        """Put the requests whose loads may begin back into their queues."""
        for request, queue in [held for held in self.held_loads.values() if self.may_load(held[0])]:
            del self.held_loads[request.request_id]
            queue.restore_request(request)
