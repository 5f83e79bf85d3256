"""At most max_loras adapters in a batch: a request whose adapter has no slot is set aside, nobody waits behind it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from actors.config import SchedulerConfig
from actors.core.request import Request
from actors.core.request_queue import order_of
from actors.core.running_rows import RunningRows


class LoraSlots:
    """Requests that were set aside, by adapter.

    Invariant: an adapter has requests here only while it has no slot: those of one adapter are all here or all not,
    but for those that arrived since.
    """

    def __init__(self, config: SchedulerConfig, rows: RunningRows) -> None:
        self._config = config
        self._rows = rows
        self._set_aside: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._set_aside.values())

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all that are set aside."""
        return chain.from_iterable(requests.values() for requests in self._set_aside.values())

    def may_join(self, request: Request) -> bool:
        """Whether the batch has, or can take, the request's adapter."""
        active = self._rows.num_by_lora
        return request.lora_name is None or request.lora_name in active or len(active) < self._config.max_loras

    def set_aside(self, request: Request) -> None:
        """Keep a request until its adapter has a slot."""
        assert request.lora_name is not None
        self._set_aside.setdefault(request.lora_name, {})[request.request_id] = request

    def remove(self, request: Request) -> bool:
        """Take a request out; returns whether it was here."""
        requests = self._set_aside.get(request.lora_name or "")
        if requests is None or requests.pop(request.request_id, None) is None:
            return False
        if not requests:
            del self._set_aside[request.lora_name or ""]
        return True

    def take_ready(self) -> list[Request]:
        """Take out the requests of adapters that run, and of as many others as there are free slots."""
        if not self._set_aside:
            return []
        active = self._rows.num_by_lora
        ready = [name for name in self._set_aside if name in active]
        waiting = [name for name in self._set_aside if name not in active]
        # Who was set aside first was first in the queue, unless the policy has another order.
        if self._config.policy == "priority":
            waiting.sort(key=lambda name: min(order_of(r, self._config) for r in self._set_aside[name].values()))
        ready += waiting[: max(0, self._config.max_loras - len(active))]
        return [request for name in ready for request in self._set_aside.pop(name).values()]
