"""The requests whose loads are under way, with their deadlines, and the queue that they enter when a load is over."""

from __future__ import annotations

from collections.abc import Iterator

from actors.core.blocks.kv_cache_manager import KVCacheManager
from actors.core.queue.removable_heap import RemovableHeap
from actors.core.queue.scheduler_queues import Queues
from actors.core.requests.request import Request
from actors.core.requests.request_status import RequestStatus


class LoadingRequests:
    """Consumers, and requests that load a prefix. A link or a store may write the blocks of these requests."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.by_id: dict[str, Request] = {}
        self._kv = kv_cache_manager
        self._deadlines: RemovableHeap[tuple[float]] = RemovableHeap()

    def begin(self, request: Request, num_local_tokens: int, timeout_s: float, now_s: float) -> None:
        """Add a request whose load begins.

        num_local_tokens: the request's tokens whose KV this engine's prefix cache has
        timeout_s: how long the load may take
        """
        if request.scheduled_at_s is None:
            self._kv.count_lookup(request, num_local_tokens)
            request.num_cached_tokens = num_local_tokens
            request.scheduled_at_s = now_s
        request.set_status(RequestStatus.WAITING_FOR_REMOTE_KVS, now_s)
        self.by_id[request.request_id] = request
        self._deadlines.push(request.request_id, (now_s + timeout_s,))

    def pop(self, request_id: str) -> Request | None:
        """Remove and return a request whose load is over or not needed any more; None if it is not here."""
        self._deadlines.remove(request_id)
        return self.by_id.pop(request_id, None)

    def pop_overdue(self, now_s: float) -> Iterator[str]:
        """Yield the ids of the requests whose deadline has passed, each once. The requests stay here until pop()."""
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now_s:
            self._deadlines.remove(first[1])
            yield first[1]

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, in seconds by the engine's clock; None if no load is under way."""
        first = self._deadlines.peek()
        return None if first is None else first[0][0]

    def start_over(self, request: Request, queues: Queues, now_s: float) -> None:
        """Queue a request whose load is over, and has left nothing of use. The request loses its blocks."""
        request.set_status(RequestStatus.WAITING, now_s)
        self._kv.free(request)
        queues.waiting.prepend_request(request)

    def go_on(self, request: Request, num_computed_tokens: int, queues: Queues, now_s: float) -> None:
        """Queue a request whose load is over, to compute the rest of its tokens. The request keeps its blocks."""
        self._kv.cache_blocks(request, num_computed_tokens)
        request.set_status(RequestStatus.WAITING, now_s)
        request.num_computed_tokens = num_computed_tokens
        queues.loaded.add_request(request)
