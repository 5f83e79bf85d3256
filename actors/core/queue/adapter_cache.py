"""Decides which LoRA adapters the workers load, and keeps the requests that wait until their adapter is loaded.

Workers load adapters in the background: one step carries the command to the workers, a later one returns the result. An
adapter is
    wanted   a request or a caller of preload() needs it, and there is no room for it yet
    loading  the workers have the command to load it
    loaded   every rank has loaded it
Invariants:
- at most max_adapters are loading or loaded
- an adapter is dropped only when it is loaded, and neither an unfinished request nor a caller of preload() needs it
- a request waits here as long as its adapter is not loaded, and no longer
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from actors.core.queue.removable_heap import RemovableHeap
from actors.core.requests.adapter import Adapter, AdapterCommands, AdapterStats
from actors.core.requests.request import Request
from actors.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class AdapterWaitOver:
    """A request whose wait is over.

    failure: why the request does not get its adapter; None if it does
    is_adapters_fault: True if the load failed; False if it took too long
    """

    request: Request
    failure: str | None = None
    is_adapters_fault: bool = False


@dataclass(slots=True)
class _Entry:
    """One adapter.

    waiting: the requests that wait until the adapter is loaded, by id
    users:   ids of all unfinished requests that need the adapter
    callers: functions that preload() was given, to be called with the load's result
    """

    adapter: Adapter
    is_loading: bool = False
    is_loaded: bool = False
    waiting: dict[str, Request] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)
    callers: list[Callable[[str | None], None]] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        return bool(self.users or self.callers)


class AdapterCache:
    """The scheduler's record of the adapters that the workers have. Only the engine thread may call its methods.

    actors/model/lora/store.py keeps the adapters in the workers.
    """

    def __init__(self, max_adapters: int, timeout_s: float, loaded: Iterable[Adapter] = ()) -> None:
        """timeout_s: how long a request waits for its adapter; loaded: adapters that the workers have already."""
        self._max_adapters = max_adapters
        self._timeout_s = timeout_s
        # In the order of last use, the least recently used adapter first.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        for adapter in loaded:
            self._entries[adapter.key] = _Entry(adapter, is_loaded=True)
        self._deadlines: RemovableHeap[tuple[float]] = RemovableHeap()
        self._over: list[AdapterWaitOver] = []
        self._drops: list[str] = []
        self._stats = AdapterStats()

    def start(self, request: Request, now_s: float) -> bool:
        """Note that a request needs its adapter until the request ends. Returns whether the request has to wait."""
        adapter = request.lora
        assert adapter is not None, "the request needs no adapter"
        entry = self._use(adapter)
        entry.users.add(request.request_id)
        if entry.is_loaded:
            return False
        entry.waiting[request.request_id] = request
        self._deadlines.push(request.request_id, (now_s + self._timeout_s,))
        return True

    def preload(self, adapter: Adapter, on_done: Callable[[str | None], None]) -> None:
        """Load an adapter before a request needs it. on_done: called with None, or with why the load failed."""
        entry = self._use(adapter)
        if entry.is_loaded:
            on_done(None)
        else:
            entry.callers.append(on_done)

    def _use(self, adapter: Adapter) -> _Entry:
        entry = self._entries.setdefault(adapter.key, _Entry(adapter))
        if entry.is_loaded:
            self._entries.move_to_end(adapter.key)
        return entry

    def release(self, request: Request) -> None:
        """Note that a request has ended, whether it was waiting or not. A second call changes nothing."""
        if request.lora is None or (entry := self._entries.get(request.lora.key)) is None:
            return
        entry.users.discard(request.request_id)
        entry.waiting.pop(request.request_id, None)
        self._deadlines.remove(request.request_id)
        if not (entry.is_needed or entry.is_loading or entry.is_loaded):
            del self._entries[request.lora.key]

    def take_commands(self) -> AdapterCommands | None:
        """Return the loads and drops for the next step, or None. The adapter that was needed first is loaded first."""
        loads: list[Adapter] = []
        num_held = sum(entry.is_loading or entry.is_loaded for entry in self._entries.values())
        for entry in [entry for entry in self._entries.values() if not (entry.is_loading or entry.is_loaded)]:
            if num_held >= self._max_adapters and not self._evict_one():
                break
            num_held = min(num_held + 1, self._max_adapters)
            entry.is_loading = True
            loads.append(entry.adapter)
        if not (loads or self._drops):
            return None
        drops, self._drops = self._drops, []
        self._stats.num_loads += len(loads)
        return AdapterCommands(tuple(loads), tuple(drops))

    def _evict_one(self) -> bool:
        for key, entry in self._entries.items():
            if entry.is_loaded and not entry.is_needed:
                del self._entries[key]
                self._drops.append(key)
                self._stats.num_evictions += 1
                return True
        return False

    def take_in(self, loads: Mapping[str, str | None]) -> None:
        """Process the results of loads, by the adapter's key: None, or why the load has failed."""
        for key, failure in loads.items():
            entry = self._entries[key]
            entry.is_loading, entry.is_loaded = False, failure is None
            if failure is not None:
                # Some ranks may have loaded the adapter, so all ranks have to drop it.
                del self._entries[key]
                self._drops.append(key)
                self._stats.num_failed_loads += 1
            for request in entry.waiting.values():
                self._deadlines.remove(request.request_id)
                self._over.append(AdapterWaitOver(request, failure, is_adapters_fault=failure is not None))
            entry.waiting.clear()
            callers, entry.callers = entry.callers, []
            for on_done in callers:
                on_done(failure)

    def take_over(self, now_s: float) -> list[AdapterWaitOver]:
        """Remove and return the requests whose adapter is loaded, cannot be loaded, or took too long."""
        over = [one for one in self._over if not one.request.is_finished()]
        self._over = []
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now_s:
            self._deadlines.remove(first[1])
            entry = next(entry for entry in self._entries.values() if first[1] in entry.waiting)
            reason = f"adapter {entry.adapter.name!r} was not loaded within {self._timeout_s:g} s"
            over.append(AdapterWaitOver(entry.waiting.pop(first[1]), reason))
        return over

    def next_deadline(self) -> float | None:
        """Return the engine's clock at the first deadline, in seconds."""
        first = self._deadlines.peek()
        return None if first is None else first[0][0]

    def waiting(self) -> list[Request]:
        """Return the requests that wait here, including those whose wait is over until take_over() removes them."""
        over = [one.request for one in self._over if not one.request.is_finished()]
        return [*over, *(request for entry in self._entries.values() for request in entry.waiting.values())]

    def make_stats(self) -> AdapterStats:
        """Return a snapshot of the adapters and their counters."""
        stats = self._stats
        loaded = [entry.adapter.name for entry in self._entries.values() if entry.is_loaded]
        return AdapterStats(loaded, len(self.waiting()), stats.num_loads, stats.num_failed_loads, stats.num_evictions)

    def check_integrity(self) -> None:
        """Raise IntegrityError if there are too many adapters, or if a request waits for an adapter that is loaded."""
        if sum(entry.is_loading or entry.is_loaded for entry in self._entries.values()) > self._max_adapters:
            raise IntegrityError(f"more than {self._max_adapters} adapters are loading or loaded")
        for key, entry in self._entries.items():
            if entry.is_loaded and entry.waiting:
                raise IntegrityError(f"requests wait for adapter {key}, which is loaded")
            if not entry.waiting.keys() <= entry.users:
                raise IntegrityError(f"a request waits for adapter {key} without needing it")
