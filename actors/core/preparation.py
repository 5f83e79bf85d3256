"""Prepares a request before it may wait for its turn: its grammar, then its adapter. Each wait has a deadline.

A prepared request enters the waiting queue at the position that it was given when it arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.core.outputs.ending import Ending
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.queue.adapter_cache import AdapterCache
from actors.core.queue.grammar_wait import GrammarWait
from actors.core.queue.request_queue import RequestQueue
from actors.core.requests.adapter import Adapter, AdapterCommands, AdapterStats
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from actors.core.requests.structured_output import GrammarStats


class Preparation:
    """The requests that wait for a grammar or an adapter. adapters: None if the engine serves no adapters."""

    def __init__(self, grammars: GrammarWait, adapters: AdapterCache | None, waiting: RequestQueue) -> None:
        self.grammars = grammars
        self.adapters = adapters
        self._waiting = waiting

    def start(self, request: Request, now_s: float) -> bool:
        """Begin to prepare a request. Returns whether it has to wait here."""
        if request.sampling_params.structured_output is not None:
            self.grammars.start(request, now_s)
            return True
        return self._start_adapter(request, now_s)

    def _start_adapter(self, request: Request, now_s: float) -> bool:
        return request.lora is not None and self.adapters is not None and self.adapters.start(request, now_s)

    def preload(self, adapter: Adapter, on_done: Callable[[str | None], None]) -> None:
        """Load an adapter before any request needs it. on_done: called with None, or with why it cannot be."""
        if self.adapters is None:
            on_done("this engine serves no adapters")
        else:
            self.adapters.preload(adapter, on_done)

    def proceed(self, now_s: float) -> list[Ending]:
        """Move prepared requests to the waiting queue; return the ends of those that cannot be prepared."""
        endings: list[Ending] = []
        for compiled in self.grammars.take_over(now_s):
            request = compiled.request
            if (failure := compiled.failure) is not None:
                cause = EndCause.REQUEST_AT_FAULT if failure.is_requests_fault else None
                endings.append(Ending(request, RequestStatus.FINISHED_ERROR, failure.reason, cause))
                continue
            request.set_status(RequestStatus.WAITING, now_s)
            if not self._start_adapter(request, now_s):
                self._waiting.restore_request(request)
        for over in () if self.adapters is None else self.adapters.take_over(now_s):
            if over.failure is None:
                self._waiting.restore_request(over.request)
            else:
                cause = EndCause.ADAPTER_AT_FAULT if over.is_adapters_fault else None
                endings.append(Ending(over.request, RequestStatus.FINISHED_ERROR, over.failure, cause))
        return endings

    def release(self, request: Request) -> None:
        """Note that a request has ended, waiting or not."""
        self.grammars.release(request)
        if self.adapters is not None:
            self.adapters.release(request)

    def next_deadline(self) -> float | None:
        """Return the engine's clock at the first deadline, in seconds."""
        own = None if self.adapters is None else self.adapters.next_deadline()
        deadlines = (self.grammars.next_deadline(), own)
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def take_commands(self) -> AdapterCommands | None:
        """Return the commands about adapters for the next step, or None."""
        return None if self.adapters is None else self.adapters.take_commands()

    def take_in(self, adapter_loads: Mapping[str, str | None]) -> None:
        """Take in the results of loads, by the adapter's key: None, or why the load has failed."""
        if adapter_loads and self.adapters is not None:
            self.adapters.take_in(adapter_loads)

    def waiting_for_adapter(self) -> list[Request]:
        """The requests that wait for their adapter: WAITING, but in no queue."""
        return [] if self.adapters is None else self.adapters.waiting()

    def waits(self) -> dict[str, int]:
        """Return how many requests wait for their grammar, and for their adapter's weights."""
        return {"grammar": len(self.grammars.requests), "adapter": len(self.waiting_for_adapter())}

    def adapter_stats(self) -> AdapterStats | None:
        """Return a snapshot of the adapters; None if the engine serves none."""
        return None if self.adapters is None else self.adapters.make_stats()

    def grammar_stats(self) -> GrammarStats | None:
        """Return a snapshot of the compilations of grammars; None if the engine compiles none."""
        return self.grammars.make_stats()

    def check_integrity(self) -> None:
        """Raise IntegrityError if the adapters' bookkeeping contradicts itself."""
        if self.adapters is not None:
            self.adapters.check_integrity()
