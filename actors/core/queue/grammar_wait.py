"""Requests in WAITING_FOR_FSM: their grammars are being compiled, each within a deadline."""

from __future__ import annotations

from dataclasses import dataclass

from actors.core.queue.removable_heap import RemovableHeap
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus
from actors.core.requests.structured_output import GrammarFailure, GrammarStats, StructuredOutputManager


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose wait is over. failure: why the request has no grammar; None if it has one."""

    request: Request
    failure: GrammarFailure | None = None


class GrammarWait:
    """Keeps the requests whose grammars are being compiled. Without a manager no request ever waits here."""

    def __init__(self, manager: StructuredOutputManager | None, timeout_s: float) -> None:
        self._manager = manager
        self._timeout_s = timeout_s
        self.requests: dict[str, Request] = {}
        self._deadlines: RemovableHeap[tuple[float]] = RemovableHeap()

    def start(self, request: Request, now_s: float) -> None:
        """Let a request wait for its grammar."""
        params = request.sampling_params.structured_output
        assert self._manager is not None, "a request with a grammar is refused before it waits here"
        assert params is not None, "the request has no grammar"
        request.set_status(RequestStatus.WAITING_FOR_FSM, now_s)
        self.requests[request.request_id] = request
        self._deadlines.push(request.request_id, (now_s + self._timeout_s,))
        self._manager.start_compiling(request.request_id, params, request.output_token_ids)

    def take_over(self, now_s: float) -> list[Compiled]:
        """Remove and return the requests whose grammar is ready, does not compile, or took too long."""
        over: list[Compiled] = []
        compiled = {} if self._manager is None else self._manager.take_compiled()
        for request_id, failure in compiled.items():
            # A grammar that comes after its request's end is dropped.
            if (request := self._take(request_id)) is not None:
                over.append(Compiled(request, failure))
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now_s:
            if (request := self._take(first[1])) is not None:
                reason = f"the grammar was not compiled within {self._timeout_s:g} s"
                over.append(Compiled(request, GrammarFailure(reason, is_requests_fault=False)))
        return over

    def release(self, request: Request) -> None:
        """Note that a request has ended, whether it was waiting or not."""
        self._take(request.request_id)
        if self._manager is not None and request.sampling_params.structured_output is not None:
            self._manager.release(request.request_id)

    def make_stats(self) -> GrammarStats | None:
        """Return a snapshot of the compilations' counters; None without a manager."""
        return None if self._manager is None else self._manager.make_stats()

    def next_deadline(self) -> float | None:
        """Return the engine's clock at the first deadline, in seconds."""
        first = self._deadlines.peek()
        return None if first is None else first[0][0]

    def _take(self, request_id: str) -> Request | None:
        self._deadlines.remove(request_id)
        return self.requests.pop(request_id, None)
