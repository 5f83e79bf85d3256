"""Records the requests of an ingress in its request trace, in a thread of its own.

Theory: the event loop only appends to a bounded queue, which takes microseconds whatever the disk does. The thread
takes requests from the queue, hashes their prompts and writes their lines. It wakes up twice a second and writes the
lines of all of them at once: each time that the thread wakes up or has written, it takes the interpreter from the event
loop. If the disk is slower than
the requests, the queue is full and further lines are dropped; if a write fails, its line is dropped. Dropped lines are
counted, and their numbers are missing in the trace. Invariant: the queue has at most MAX_PENDING requests, and of more
than one request at most MAX_PENDING_TOKENS prompt tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from actors.core.requests.block_hash import BlockHashKey
from actors.core.requests.request import EngineCoreRequest
from cluster.observability.status import RequestTraceView
from cluster.observability.trace_writing.request_lines import make_line
from cluster.observability.trace_writing.trace_parts import TraceLimits, TraceParts
from cluster.routing.request_record import RequestRecord
from cluster.settings.request_recording import RequestTraceConfig
from cluster.traces.request_trace import TraceHeader, encode_line

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 2048
MAX_PENDING_TOKENS: Final = 1_000_000
"""A token of a list takes about 36 bytes."""
_MAX_BATCH: Final = 256
"""The most lines of one write."""
_GATHER_S: Final = 0.5
"""How long the thread lets requests gather before it writes their lines, unless half of the queue is full."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended. arrived_s: on the clock of RequestTracer"""

    number: int
    record: RequestRecord
    arrived_s: float
    request: EngineCoreRequest | None

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that the queue keeps in memory for it."""
        return 0 if self.request is None else len(self.request.prompt_token_ids)


def start_tracer(
    settings: RequestTraceConfig, ingress: str, block_hash_key: BlockHashKey, *, now_s: float, monotonic_s: float
) -> RequestTracer:
    """Begin a request trace. Its first file is made with its first line.

    ingress:        the name of the ingress
    block_hash_key: the cluster's key. Hashes in files have a key that is derived from it: they are not those by which
                    engines and KV stores name blocks
    now_s, monotonic_s: now, as Unix time and on the clock of RequestTracer.put()
    """
    header = TraceHeader(began_at_s=now_s, ingress=ingress, part=1, block_hashes=settings.block_hashes)
    limits = TraceLimits(settings.max_file_mib << 20, settings.max_files)
    derived = blake2b(key=block_hash_key.value, person=b"request-trace", digest_size=len(block_hash_key.value)).digest()
    return RequestTracer(TraceParts(settings.directory, header, limits, BlockHashKey(derived)), monotonic_s)


class RequestTracer:
    """Writes the request trace of one ingress. put() is for the event loop, view() for any thread."""

    def __init__(self, parts: TraceParts, began_s: float) -> None:
        """Start the thread. began_s: when the trace began, on the monotonic clock of put()'s arrived_s"""
        self._parts = parts
        self._began_s = began_s
        self._pending: deque[_Ended] = deque()
        self._num_pending_tokens = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_requests = 0
        self._num_lines = 0
        self._num_dropped = 0
        self._error = ""
        # Daemon: a disk that never answers must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name="request-trace", daemon=True)
        self._thread.start()

    def put(self, record: RequestRecord, arrived_s: float, request: EngineCoreRequest | None) -> None:
        """Record a request that has ended; drop it if the thread is behind. request: None if it was never tokenized"""
        with self._changed:
            self._num_requests += 1
            ended = _Ended(self._num_requests, record, arrived_s, request)
            num_tokens = self._num_pending_tokens + ended.num_tokens
            is_full = len(self._pending) >= MAX_PENDING or num_tokens > MAX_PENDING_TOKENS
            if self._is_closing or (is_full and self._pending):
                self._num_dropped += 1
                return
            self._pending.append(ended)
            self._num_pending_tokens = num_tokens
            if len(self._pending) == 1 or self._is_half_full():
                self._changed.notify()

    def view(self) -> RequestTraceView:
        """Return how many lines were written and dropped since the start, and why writing fails now."""
        return RequestTraceView(self._num_lines, self._num_dropped, self._error)

    def close(self, timeout_s: float) -> None:
        """Write what is pending, and stop the thread; give up after timeout_s. This waits, so not on an event loop."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._gather():
            while batch := self._take():
                while batch:
                    del batch[: self._write(batch)]
        self._parts.close()

    def _gather(self) -> bool:
        """Wait until there are requests to write; False if there are none to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            self._changed.wait_for(lambda: self._is_closing or self._is_half_full(), _GATHER_S)
            return bool(self._pending)

    def _is_half_full(self) -> bool:
        return 2 * len(self._pending) >= MAX_PENDING or 2 * self._num_pending_tokens >= MAX_PENDING_TOKENS

    def _take(self) -> list[_Ended]:
        """Take the oldest requests out of the queue; none if it is empty."""
        with self._changed:
            batch = [self._pending.popleft() for _ in range(min(len(self._pending), _MAX_BATCH))]
            self._num_pending_tokens -= sum(ended.num_tokens for ended in batch)
            return batch

    def _write(self, batch: Sequence[_Ended]) -> int:
        """Write the lines of the first requests, as many as the file takes; returns how many requests these are.

        They are one write. Where it fails, each line is written alone, so that those are written that have room.
        """
        num_requests, made, lines = 0, list[_Ended](), list[bytes]()
        try:
            hash_key, room_bytes = self._parts.ready(), self._parts.room_bytes
            for ended in batch:
                if room_bytes <= 0:
                    break
                num_requests += 1
                if line := self._line(ended, hash_key):
                    room_bytes -= len(line)
                    made.append(ended)
                    lines.append(line)
            self._parts.append(b"".join(lines))
        except OSError as error:
            if len(made) > 1:
                for ended in made:
                    self._write([ended])
                return num_requests
            self._fail(error.strerror or str(error))
            return max(1, num_requests)
        self._num_lines += len(lines)
        if lines and self._error:
            self._error = ""
            logger.info("the request trace is written again", extra={"num_dropped": self._num_dropped})
        return num_requests

    def _line(self, ended: _Ended, hash_key: BlockHashKey | None) -> bytes:
        """Return the line of a request; nothing if it cannot be made."""
        try:
            arrival_s = ended.arrived_s - self._began_s
            return encode_line(make_line(ended.number, ended.record, arrival_s, ended.request, hash_key))
        except Exception:
            # Whatever is wrong with one request, the lines of the others are still written.
            logger.exception(
                "a line of the request trace cannot be made", extra={"request_id": ended.record.request_id}
            )
            self._fail("a line cannot be made: see the log")
            return b""

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._num_dropped += 1
        if reason != self._error:
            self._error = reason
            logger.warning("the request trace cannot be written: its lines are dropped", extra={"reason": reason})
