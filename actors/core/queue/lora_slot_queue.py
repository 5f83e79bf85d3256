"""Keeps the requests whose LoRA adapter has no slot in the batch, so that no other request waits behind them.

A batch has slots for max_loras adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from actors.config import SchedulerConfig
from actors.core.queue.lora_waits import LoraWaits
from actors.core.queue.request_queue import RequestQueue, order_of
from actors.core.requests.request import Request
from actors.core.requests.running_rows import RunningRows


class LoraSlots:
    """The requests that were set aside, by adapter.

    Invariant: an adapter has requests here only while it has no slot, or while it gives way to another adapter. Then
    all its waiting requests are here, except those that arrived later, and those that come before the overdue request.
    """

    def __init__(self, config: SchedulerConfig, rows: RunningRows, waits: LoraWaits, *, has_blocks: bool) -> None:
        """has_blocks: the requests hold blocks, so they may take any free slot."""
        self._config = config
        self._rows = rows
        self._waits = waits
        self._has_blocks = has_blocks
        self._set_aside: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._set_aside.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that are set aside."""
        return chain.from_iterable(requests.values() for requests in self._set_aside.values())

    def may_join(self, request: Request) -> bool:
        """Whether the request may join the batch, as far as slots for adapters are concerned."""
        if self._has_blocks:
            return request.lora_name is None or self._waits.has_slot(request.lora_name)
        return self._waits.may_join(request)

    def set_aside(self, request: Request, now_s: float) -> None:
        """Keep a request until its adapter has a slot."""
        assert request.lora_name is not None
        self._set_aside.setdefault(request.lora_name, {})[request.request_id] = request
        self._waits.begin(request, now_s)

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns whether it was here."""
        requests = self._set_aside.get(request.lora_name or "")
        if requests is None or requests.pop(request.request_id, None) is None:
            return False
        if not requests:
            del self._set_aside[request.lora_name or ""]
        return True

    def bring_back(self, queue: RequestQueue) -> None:
        """Put requests back into the queue: those of adapters in the batch, and of as many others as slots are free."""
        if not self._set_aside:
            return
        active = self._rows.num_by_lora
        num_free = self._config.max_loras - len(active)
        for lora_name in [name for name in self._set_aside if name in active]:
            self._bring_back(lora_name, queue)
        for lora_name in self._in_order(name for name in self._set_aside if name not in active):
            if num_free <= 0:
                break
            num_free -= self._bring_back(lora_name, queue)

    def _in_order(self, lora_names: Iterator[str]) -> list[str]:
        """Return the adapters in the order in which they get slots: longest wait first, or by the priority policy."""
        if self._config.policy == "priority":
            return sorted(lora_names, key=lambda name: min(map(self._order_of, self._set_aside[name].values())))
        return sorted(lora_names, key=self._waits.since)

    def _order_of(self, request: Request) -> tuple[float, float, str]:
        return order_of(request, self._config)

    def _bring_back(self, lora_name: str, queue: RequestQueue) -> bool:
        """Put those of an adapter's requests that may join back into the queue. Returns whether there were any."""
        ready = [request for request in self._set_aside[lora_name].values() if self.may_join(request)]
        for request in ready:
            self.remove(request)
            queue.restore_request(request)
        return bool(ready)
