"""One submission of a request to the engines of a route: submit, listen, abort.

A finished output of the decode engine ends the attempt; so does one of the prefill engine, if the first token ended the
request. A failure of the prefill engine does not end the attempt: the decode engine computes the prompt itself, so the
attempt waits for its outputs. A failure of the decode engine ends the attempt, unless a successor has the request too.
A preempted request may migrate. Its decode engine and a second one, the successor, then both have the request, and the
engine that gives the next token first keeps it. So the blocks stay cached at the first engine until the successor has
fetched them, and nothing is lost if the successor cannot take the request.
Invariant: when the attempt is closed, each engine has sent its last output of the request, or was told to abort it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, RequestTimings
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import (
    DeadlineExceeded,
    EngineFailed,
    OutputsDiverged,
)
from cluster.parameters.generation import EngineReport
from cluster.requests.engine_stream import EndKind, EngineStream
from cluster.requests.output_order import Diverged, OutputOrder
from cluster.requests.recovery_decisions import FailedAttempt
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineConnection
from cluster.routing.request_record import AttemptRecord, EngineTimes
from cluster.routing.tickets import submission_alone, submission_with_ticket
from kv_transfer.params import TransferRole

logger = logging.getLogger(__name__)


class Attempt:
    """Submits the request when it is entered as an async context manager, and aborts what still runs when it is left.

    Iterating over the attempt yields the outputs in order, each position once.
    """

    def __init__(self, route: Route[EngineConnection], request: EngineCoreRequest, deadline_s: float | None) -> None:
        """deadline_s: when the client stops waiting, on the event loop's clock; None if it has no deadline"""
        self._route = route
        self._request = request
        self._deadline_s = deadline_s
        self._order = OutputOrder(request.output_token_ids)
        self._ready: deque[EngineCoreOutput] = deque()
        self._prefill: EngineStream | None = None
        self._successor: EngineStream | None = None
        self._predecessors: list[EngineStream] = []
        self._lost_targets: list[EngineStream] = []
        # Times on the event loop's clock, for the request's record.
        self.began_at = 0.0
        """When it was entered, on the event loop's clock. The times of its record count from here."""
        self._first_token_at: float | None = None
        self._moved_at: list[float] = []
        # Reads of several engines at once. A decode engine that is the only one left is read without a task.
        self._reads: dict[EngineStream, asyncio.Task[EngineCoreOutput | None]] = {}

    async def __aenter__(self) -> Self:
        """Submit to both engines. The consumer comes first, because its reservation lets the producer start."""
        self._submit()
        return self

    def _submit(self) -> None:
        self.began_at = _now_s()
        prefill, decode = self._route.prefill, self._route.decode
        if prefill is None:
            self._decode = EngineStream(decode, submission_alone(self._request, self._route))
        else:
            consumer, producer = (
                submission_with_ticket(self._request, self._route, role)
                for role in (TransferRole.CONSUMER, TransferRole.PRODUCER)
            )
            self._decode = EngineStream(decode, consumer)
            try:
                self._prefill = EngineStream(prefill, producer)
            except BaseException:
                self._decode.abort()
                raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abort the request on every engine that still has it. Waits for the attempt's reads to end, for no engine."""
        for stream in self._streams:
            stream.abort()
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    @property
    def token_ids(self) -> Sequence[int]:
        """Every output token so far, including those that the request came with."""
        return self._order.token_ids

    @property
    def route(self) -> Route[EngineConnection]:
        """The engines that have the request now."""
        return replace(self._route, decode=self._decode.connection)

    @property
    def num_migrations(self) -> int:
        """How often another decode engine has taken the request over."""
        return len(self._predecessors)

    @property
    def can_migrate(self) -> bool:
        """Whether a single engine has the request and its output so far is without a gap."""
        is_alone = self._successor is None and not self._is_prefilling
        return is_alone and self._decode.end is None and not self._order.has_gap

    def migrate(self, decode: EngineConnection, request: EngineCoreRequest) -> None:
        """Submit the request to a second decode engine too.

        request: the request as the second engine gets it, under an id of its own; it goes on after token_ids
        """
        assert self.can_migrate, "at most two engines decode a request"
        self._successor = EngineStream(decode, request)

    @property
    def is_waiting(self) -> bool:
        """Whether the engines that it was submitted to still have it, and have given no token."""
        streams = self._streams
        return not self.num_new_tokens and not self._ready and all(one.end is None for one in streams)

    def reroute(self, route: Route[EngineConnection], request: EngineCoreRequest) -> None:
        """Abort the request on its engines, which have given no token, and submit it to others under another id."""
        assert self.is_waiting, "only a request that waits goes elsewhere"
        for stream in self._streams:
            stream.abort()
        # What still comes of these streams is ignored, as it is of any that the attempt has no more.
        self._prefill = self._successor = None
        self._route, self._request = route, request
        self._submit()

    @property
    def has_decoded(self) -> bool:
        """Whether the decode engine has given tokens: it has survived at least one step with the request."""
        return self._decode.has_given_tokens

    def failed_by(self, error: EngineFailed) -> FailedAttempt:
        """Describe how far the attempt came before it ended with this error."""
        # The request may have killed either engine of a handoff: after the prefill engine's death, the decode engine
        # computes the prompt itself.
        others = [*self._streams, *self._predecessors, *self._lost_targets]
        suspects = [self._decode] if self.has_decoded else others
        end = self._decode.end
        is_out_of_blocks = end is not None and end.kind is EndKind.OUT_OF_BLOCKS
        return FailedAttempt(
            error,
            list(self.token_ids),
            {stream.connection.descriptor.key for stream in suspects if stream.has_died},
            has_decoded=self.has_decoded,
            was_out_of_blocks=is_out_of_blocks and self.num_new_tokens > 0,
        )

    @property
    def prefill_report(self) -> EngineReport | None:
        """The prefill engine and its times; None if the decode engine computes the prompt as well."""
        return None if self._prefill is None else self._prefill.report

    @property
    def decode_report(self) -> EngineReport:
        """The decode engine and its times."""
        return self._decode.report

    def record(self, began_s: float) -> AttemptRecord:
        """Describe the attempt as it is now, for the request's record. began_s: seconds after the request's arrival"""
        prefill = self._prefill
        decoders = [*self._predecessors, self._decode]
        return AttemptRecord(
            began_s=began_s,
            decode_engine_ids=tuple(stream.engine_id for stream in decoders),
            prefill_engine_id=None if prefill is None else prefill.engine_id,
            decision=self._route.decision,
            num_new_tokens=self.num_new_tokens,
            prefill=None if prefill is None else EngineTimes.of(prefill.timings),
            decode=EngineTimes.of(self._decode.timings),
            prefill_failure=(prefill and prefill.failure) or "",
            first_token_s=None if self._first_token_at is None else began_s + self._first_token_at - self.began_at,
            moved_s=tuple(began_s + at - self.began_at for at in self._moved_at),
        )

    @property
    def prefill_timings(self) -> RequestTimings | None:
        """The times of the engine that computed the prompt; None if that engine has not reported any."""
        # After a migration, the new engine finds blocks that the first engine computed, so only the first engine's
        # times count.
        decode = self._predecessors[0] if self._predecessors else self._decode
        return (self._prefill and self._prefill.timings) or decode.timings

    def __aiter__(self) -> Self:
        """Iterate over the outputs in order, each position once; the request's last output has a finish_reason."""
        return self

    async def __anext__(self) -> EngineCoreOutput:
        """Wait for the next output.

        Raises EngineFailed if none of the attempt's engines can go on, OutputsDiverged, DeadlineExceeded, or
        InvalidRequest if no engine at all could serve the request.
        """
        while not self._ready:
            self._fail_if_nothing_can_follow()
            stream, output = await self._next_in_time()
            if stream is not self._decode and stream not in self._streams:
                continue  # This stream lost against the other engine of a migration, which was faster.
            if output is None:
                self._on_silent_end(stream)
            elif output.preemption is None:
                self._settle_migration(stream)
                self._settle_prefill(stream, output)
                self._ready.extend(self._in_order(output))
            elif self.can_migrate:
                self._ready.append(output)
        return self._ready.popleft()

    async def _next_in_time(self) -> tuple[EngineStream, EngineCoreOutput | None]:
        """Wait like _next_of_any(), up to the deadline. Raises DeadlineExceeded."""
        if self._deadline_s is None:
            return await self._next_of_any()  # Without a deadline, no timer has to be set for each token.
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await self._next_of_any()
        except TimeoutError:
            raise DeadlineExceeded(self._request.request_id) from None

    async def _next_of_any(self) -> tuple[EngineStream, EngineCoreOutput | None]:
        """Wait for the next output of any engine; None in its place if the engine sends no more."""
        listening = [stream for stream in self._streams if stream.end is None or stream in self._reads]
        if listening == [self._decode] and not self._reads:
            return self._decode, await self._decode.next_output()
        for stream in listening:
            if stream not in self._reads:
                self._reads[stream] = asyncio.create_task(stream.next_output())
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        stream = next(stream for stream, read in self._reads.items() if read.done())
        return stream, self._reads.pop(stream).result()

    def _in_order(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        try:
            return self._order.push(output)
        except Diverged as exc:
            request_id, num_new_tokens = self._request.request_id, self.num_new_tokens
            raise OutputsDiverged(request_id, str(exc), num_new_tokens=num_new_tokens, can_resume=True) from exc

    def _on_silent_end(self, stream: EngineStream) -> None:
        if stream is self._successor:
            self._successor = None
            if stream.has_died:
                # Only tokens that the decode engine gives from now on show that the request did not cause this death.
                self._lost_targets.append(stream)
                self._decode.has_given_tokens = False
            logger.info("a migration failed: the request stays on its engine", extra=self._fields(stream))
            return
        if stream.end is None or stream.end.reason is None:
            return
        if stream is self._decode and self._successor is not None:
            logger.warning(
                "the engine of a migrating request failed: the other engine continues the request",
                extra=self._fields(stream),
            )
            self._settle_migration(self._successor)
            return
        if stream is self._decode:
            raise self._failed(stream.end.reason, can_resume=stream.end.can_resume)
        logger.warning("the prefill engine failed: the decode engine computes the prompt", extra=self._fields(stream))

    def _settle_prefill(self, stream: EngineStream, output: EngineCoreOutput) -> None:
        """Note the attempt's first token. If the decode engine gives it, abort at the prefill engine.

        The decode engine has refused the handoff then.
        """
        if output.first_position != len(self._request.output_token_ids) or not output.new_token_ids:
            return
        if self._first_token_at is None:
            self._first_token_at = _now_s()
        if stream is self._decode and self._prefill is not None:
            self._prefill.abort()

    def _settle_migration(self, winner: EngineStream) -> None:
        """End a migration: abort the request at the decode engine that did not give the next token."""
        successor, self._successor = self._successor, None
        if successor is None:
            return
        if winner is not successor:
            successor.abort()
            logger.info("a migration was cancelled: the request's own engine was faster", extra=self._fields(successor))
            return
        self._decode.abort()
        self._moved_at.append(_now_s())
        self._predecessors.append(self._decode)
        self._decode = successor

    def _fields(self, stream: EngineStream) -> dict[str, str | None]:
        """Return the log fields of one engine's stream."""
        return {"request_id": self._request.request_id, "engine_id": stream.engine_id, "reason": stream.failure}

    def _fail_if_nothing_can_follow(self) -> None:
        """Raise EngineFailed, or DeadlineExceeded if that is why, when no engine can bring the next position.

        Only the prefill engine can fill a gap, and only a stream that has not ended can bring the end.
        """
        if self._order.has_gap and not self._is_prefilling:
            raise self._failed(f"position {len(self.token_ids)} of the output is missing", can_resume=True)
        if not any(self._is_listening(stream) for stream in self._streams):
            ends = [stream.end for stream in self._streams if stream.end is not None]
            reasons = [end.reason for end in ends if end.reason is not None]
            can_resume = any(end.can_resume for end in ends)
            reason = "; ".join(reasons) or "its engines dropped the request before it was finished"
            raise self._failed(reason, can_resume=can_resume)

    @property
    def _is_prefilling(self) -> bool:
        return self._prefill is not None and self._is_listening(self._prefill)

    def _is_listening(self, stream: EngineStream) -> bool:
        return stream.end is None or stream in self._reads

    def _failed(self, reason: str, *, can_resume: bool) -> EngineFailed | DeadlineExceeded:
        """Make the attempt's error: DeadlineExceeded once the deadline has passed, since engines drop requests then."""
        if self._deadline_s is not None and asyncio.get_running_loop().time() >= self._deadline_s:
            return DeadlineExceeded(self._request.request_id)
        request_id, num_new_tokens = self._request.request_id, self.num_new_tokens
        return EngineFailed(request_id, reason, num_new_tokens=num_new_tokens, can_resume=can_resume)

    @property
    def num_new_tokens(self) -> int:
        """The number of output tokens that this attempt has given so far."""
        return len(self.token_ids) - len(self._request.output_token_ids)

    @property
    def _streams(self) -> list[EngineStream]:
        return [stream for stream in (self._prefill, self._decode, self._successor) if stream is not None]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
