"""Bounds how long a LoRA adapter waits for a slot in the batch, so that no adapter waits for ever.

A batch has slots for max_loras adapters. If requests for that many adapters never stop coming, requests for another
adapter would never run. So adapters in the batch give way to an adapter that has waited for too long:
- An adapter's wait begins when one of its requests is set aside because the adapter has no slot. The adapter is
  *overdue* when max_lora_wait_s have passed and it still has no slot.
- For each overdue adapter that finds no free slot, one adapter gives way: the one that has been in the batch longest.
  None of its waiting requests joins the batch any more. When its running requests have ended, its slot is free. From
  then on the adapter waits like any other.

Some requests are held back meanwhile. They all come after the first overdue request, by arrival or by the policy's
order, so a request is held back for finitely many others only. They are
- requests of adapters that give way, and of adapters that would take a slot which an overdue adapter needs;
- requests whose KV would have to be loaded. A request whose load is over may always take a free slot, since it holds
  blocks that an overdue request may need. So the number of loads must not grow meanwhile.
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
    """The requests of an adapter that have been set aside.

    since_s: since when the adapter has had no slot, by the engine's clock
    """

    since_s: float
    requests: dict[str, Request] = field(default_factory=dict)


class LoraWaits:
    """Decides which adapters are overdue, which give way to them, and which loads are held back meanwhile.

    Requests without an adapter are never held back, and take no time here.
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
        """Note that a request's adapter has no slot. now_s: seconds by the engine's clock."""
        assert request.lora_name is not None
        self._waits.setdefault(request.lora_name, _Wait(now_s)).requests[request.request_id] = request

    def end(self, request: Request) -> None:
        """Note that a request does not wait for a slot any more: it runs, has ended, or waits for something else."""
        if request.lora_name is None:
            return
        self.held_loads.pop(request.request_id, None)
        wait = self._waits.get(request.lora_name)
        if wait is not None and wait.requests.pop(request.request_id, None) is not None and not wait.requests:
            del self._waits[request.lora_name]

    def since(self, lora_name: str) -> float:
        """Return when the adapter's wait began, in seconds by the engine's clock. The adapter has to be waiting."""
        return self._waits[lora_name].since_s

    def look(self, now_s: float) -> None:
        """Find out which adapters are overdue. The scheduler calls this before each step."""
        if not self._waits:
            self._overdue, self._first = [], None
            return
        for lora_name in self._waits.keys() & self._rows.num_by_lora.keys():
            # An adapter that gives way still has its slot while its requests wait, so its own wait has not begun.
            self._waits[lora_name].since_s = now_s
        longest = now_s - self._config.max_lora_wait_s
        self._overdue = [lora_name for lora_name, wait in self._waits.items() if wait.since_s <= longest]
        late = (request for lora_name in self._overdue for request in self._waits[lora_name].requests.values())
        self._first = min(map(self._position_of, late), default=None)

    # -- questions -----------------------------------------------------------------------------------------------

    def has_slot(self, lora_name: str) -> bool:
        """Whether the adapter is in the batch, or the batch has a free slot."""
        active = self._rows.num_by_lora
        return lora_name in active or len(active) < self._config.max_loras

    def may_join(self, request: Request) -> bool:
        """Whether a waiting request without blocks may join the batch, as far as slots for adapters are concerned."""
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
        """Whether a request's load may begin. The request takes no slot before the load is over."""
        return request.lora_name is None or not self._comes_after(request)

    def _comes_after(self, request: Request) -> bool:
        return self._first is not None and self._position_of(request) > self._first

    def _position_of(self, request: Request) -> _Position:
        if self._config.policy == "priority":
            return order_of(request, self._config)
        return (0.0, request.arrival_time, "")

    # -- loads ---------------------------------------------------------------------------------------------------

    def hold_load(self, request: Request, queue: RequestQueue) -> None:
        """Take a request whose load may not begin out of its queue, and keep it."""
        queue.remove_request(request)
        self.held_loads[request.request_id] = (request, queue)

    def bring_back_loads(self) -> None:
        """Put the requests whose loads may begin back into their queues."""
        for request, queue in [held for held in self.held_loads.values() if self.may_load(held[0])]:
            del self.held_loads[request.request_id]
            queue.restore_request(request)
