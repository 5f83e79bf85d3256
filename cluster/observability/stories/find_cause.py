"""Names what made a request slow: the longest time that it waited or lost, or else the longest work, in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cluster.observability.stories import phases
from cluster.observability.stories.request_story import PhaseSpan
from cluster.observability.stories.silent_engines import (
    queues_in_words,
    reservation_in_words,
    waits_for_reservation,
)
from cluster.routing.request_record import AttemptRecord, RequestRecord

_MIN_PART: Final = 0.2
"""A wait is the cause if it took this part of the request's time."""
_MIN_PART_OF_TTFT: Final = 0.5
"""A wait before the first token is the cause as well if it took this part of the time to the first token."""
_MIN_OF_TTFT_S: Final = 0.1


class _Longest:
    """The longest loss that counts: a time in which nothing was computed that counted.

    words: returns it in words, which are made of the cause only; None if no loss counts
    """

    __slots__ = ("_least_before_token_s", "_least_s", "_seconds", "words")

    def __init__(self, duration_s: float, ttft_s: float | None) -> None:
        self._seconds = 0.0
        self._least_s = _MIN_PART * duration_s
        self._least_before_token_s = self._least_s
        if ttft_s is not None:
            self._least_before_token_s = min(self._least_s, max(_MIN_OF_TTFT_S, _MIN_PART_OF_TTFT * ttft_s))
        self.words: Callable[[], str] | None = None

    def is_beaten_by(self, seconds: float) -> bool:
        """Take the time of a loss if it is longer and counts, and return whether it does."""
        if seconds <= self._seconds or seconds < self._least_s:
            return False
        self._seconds = seconds
        return True

    def is_beaten_before_token_by(self, seconds: float) -> bool:
        """Do what is_beaten_by() does, for a loss before the first token."""
        if seconds <= self._seconds or seconds < self._least_before_token_s:
            return False
        self._seconds = seconds
        return True


def find_cause(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return the cause in words.

    spans:      of the whole request
    duration_s: from the request's arrival to its end, or up to now
    """
    if not record.attempts:
        return f"no engine has had it: it spent {in_words(duration_s)} at the ingress"
    longest = _Longest(duration_s, record.ttft_s)
    _add_failures(longest, record, duration_s)
    admitted_s = record.attempts[0].began_s
    if longest.is_beaten_before_token_by(admitted_s):
        longest.words = partial(_admission, admitted_s)
    _add_waits(longest, record, spans, duration_s)
    _add_unread(longest, record)
    if longest.words is not None:
        return longest.words()
    failed = next((one.failure for one in record.attempts if one.failure), "")
    return _work(record, spans, duration_s) + (f"; on the way, {failed}" if failed else "")


def in_words(seconds: float) -> str:
    """Return a duration in s, ms or us."""
    if 0 < abs(seconds) < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _add_failures(longest: _Longest, record: RequestRecord, duration_s: float) -> None:
    """Add the cost of each failed attempt: all of it if it brought no token, and the time until tokens came."""
    num_tokens = 0
    for index, attempt in enumerate(record.attempts):
        num_tokens += attempt.num_new_tokens
        if attempt.prefill_failure:
            lost_s = (attempt.first_token_s or duration_s) - attempt.began_s
            if longest.is_beaten_by(lost_s):
                longest.words = partial(_prefill_failure, attempt, lost_s)
        if attempt.ended_s is None or attempt.was_left:
            continue
        began_s = attempt.ended_s if attempt.num_new_tokens else attempt.began_s
        if index + 1 == len(record.attempts):
            if longest.is_beaten_by(duration_s - began_s):
                longest.words = partial("{}; no other engine continued it".format, attempt.failure)
            continue
        successor = record.attempts[index + 1]
        resumed_s = successor.first_token_s if successor.first_token_s is not None else duration_s
        # Before the ingress notices that an engine is lost, the client has waited as well.
        silent_s = (record.itl_max_s or 0.0) if attempt.num_new_tokens else 0.0
        lost_s = max(resumed_s - began_s, silent_s)
        if longest.is_beaten_by(lost_s):
            longest.words = partial(_recovered, attempt, successor, num_tokens, lost_s)


def _admission(admitted_s: float) -> str:
    return f"spent {in_words(admitted_s)} at the ingress before an engine got it: admission, tokenization"


def _prefill_failure(attempt: AttemptRecord, lost_s: float) -> str:
    text = f"{attempt.prefill_failure}: {attempt.decode_engine_ids[-1]} computed the prompt itself"
    return f"{text}, and the first token came {in_words(lost_s)} after the submission"


def _recovered(attempt: AttemptRecord, successor: AttemptRecord, num_tokens: int, lost_s: float) -> str:
    went_on = f"resumed from token {num_tokens}" if num_tokens else "began again"
    return f"{attempt.failure}; {went_on} on {successor.decode_engine_ids[-1]}, which cost {in_words(lost_s)}"


def _add_waits(longest: _Longest, record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> None:
    """Add the waits of the last attempt that had an engine, and the preemptions and migrations of all."""
    last = record.attempts[-1]
    is_first = len(record.attempts) == 1
    newest = 1 if is_first else max([span.attempt for span in spans], default=0)
    left = [number for number, attempt in enumerate(record.attempts, 1) if attempt.was_left]
    queued_s = reserved_s = 0.0
    queues: list[str] = []
    reservation = ""
    late: list[PhaseSpan] = []
    preempted: list[PhaseSpan] = []
    for span in spans:
        phase = span.phase
        if phase is phases.PREEMPTED:
            preempted.append(span)
        elif not is_first and span.attempt != newest and span.attempt not in left:
            continue
        elif phase is phases.QUEUE:
            queued_s += span.seconds(duration_s)
            queues.append(span.engine_id)
        elif phase is phases.RESERVATION:
            reserved_s += span.seconds(duration_s)
            reservation = span.engine_id
        elif phase is phases.TRANSFER_EXPOSED or phase is phases.BATCH:
            late.append(span)
    # A producer begins once its consumer has reserved blocks: this part of its queue is the consumer's.
    queued_s -= reserved_s
    takes = longest.is_beaten_before_token_by if is_first else longest.is_beaten_by
    if takes(queued_s):
        longest.words = partial(_queue, record.attempts[0] if left else last, queues, queued_s)
    if takes(reserved_s):
        longest.words = partial(_reservation, reservation, reserved_s)
    for span in late:
        if longest.is_beaten_by(span.seconds(duration_s)):
            is_transfer = span.phase is phases.TRANSFER_EXPOSED
            longest.words = (
                partial(_transfer, last, span, duration_s) if is_transfer else partial(_batch, span, duration_s)
            )
    if preempted or last.moved_s or not is_first:
        _add_preemptions(longest, record, preempted, duration_s)


def _queue(attempt: AttemptRecord, engine_ids: list[str], queued_s: float) -> str:
    terms = None if attempt.decision is None else attempt.decision.chosen
    predicted = "" if terms is None else f", where {in_words(terms.prefill_wait_s)} were predicted"
    late = f", or {attempt.decode_engine_ids[-1]} reserved blocks late, which it has not reported"
    rest = late if attempt.prefill is not None and attempt.decode is None else ""
    where = " and of ".join(dict.fromkeys(engine_ids))
    return f"waited {in_words(queued_s)} in the queue of {where}{predicted}: other requests came first{rest}"


def _reservation(engine_id: str, reserved_s: float) -> str:
    return f"waited {in_words(reserved_s)} until {engine_id} reserved blocks: its KV cache or its batch was full"


def _batch(span: PhaseSpan, duration_s: float) -> str:
    waited = in_words(span.seconds(duration_s))
    return f"waited {waited} for the batch of {span.engine_id}: its KV was there, and the batch was full"


def _transfer(attempt: AttemptRecord, span: PhaseSpan, duration_s: float) -> str:
    exposed, times = in_words(span.seconds(duration_s)), attempt.decode
    if times is None or not times.transfer_s:
        return f"waited {exposed} for KV that {span.engine_id} fetched from another engine"
    rate, size = times.num_transferred_bytes / times.transfer_s / 1e6, times.num_transferred_bytes / 1e6
    route = f"from {attempt.prefill_engine_id} to {span.engine_id}"
    return f"transfer exposed for {exposed}: {size:.1f} MB {route} at {rate:.1f} MB/s"


def _add_preemptions(longest: _Longest, record: RequestRecord, preempted: list[PhaseSpan], duration_s: float) -> None:
    if preempted:
        seconds = sum(span.seconds(duration_s) for span in preempted)
        if longest.is_beaten_by(seconds):
            longest.words = partial(_preempted, preempted, seconds)
    for attempt in record.attempts:
        if attempt.moved_s and record.itl_max_s and longest.is_beaten_by(record.itl_max_s):
            longest.words = partial(_moved, attempt, record.itl_max_s)


def _preempted(spans: list[PhaseSpan], seconds: float) -> str:
    times = {1: "once", 2: "twice"}.get(len(spans), f"{len(spans)} times")
    engines = ", ".join(dict.fromkeys(span.engine_id for span in spans))
    return f"{engines} had no free blocks: preempted {times}, for {in_words(seconds)} in all"


def _moved(attempt: AttemptRecord, gap_s: float) -> str:
    route = " to ".join(attempt.decode_engine_ids)
    text = f"{attempt.decode_engine_ids[0]} had no free blocks: migrated from {route}"
    return f"{text}, with {in_words(gap_s)} between two tokens"


def _add_unread(longest: _Longest, record: RequestRecord) -> None:
    """Add the time after the engine's end, if the engine has reported one: the client reads no faster."""
    attempt = record.attempts[-1]
    if attempt.decode is None or not attempt.decode.statuses or record.duration_s is None or attempt.moved_s:
        return
    unread_s = record.duration_s - attempt.began_s - attempt.decode.statuses[-1].at_s
    if longest.is_beaten_by(unread_s):
        longest.words = partial(_unread, unread_s)


def _unread(unread_s: float) -> str:
    return f"the client took {in_words(unread_s)} to read on after the last token was generated"


def _work(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return which work took longest, for a request that waited for nothing in particular."""
    # Keys have numbers for the phases: the hash of an enum's member is computed in Python, which takes longer.
    seconds: dict[tuple[int, str], float] = {}
    for span in spans:
        phase = span.phase
        if phase is phases.DECODE:
            key = 0, span.engine_id
        elif phase is phases.PREFILL:
            key = 1, span.engine_id
        elif phase is phases.UNREPORTED:
            key = 2, span.engine_id
        else:
            continue
        seconds[key] = seconds.get(key, 0.0) + span.seconds(duration_s)
    if not seconds:
        return f"nothing took long: {in_words(duration_s)} in all"
    (number, engine_id), longest_s = max(seconds.items(), key=lambda item: item[1])
    took = f"{in_words(longest_s)} of {in_words(duration_s)}"
    if number == 2:
        if record.outcome is None and (queue := waits_for_reservation(record)) is not None:
            return reservation_in_words(queue, in_words(duration_s - record.attempts[-1].began_s))
        if record.outcome is None:
            queues = queues_in_words(record)
            now = f". Now {queues}" if queues else ""
            return f"{engine_id} has had it for {took}; engines report at their end what they did{now}"
        return f"{engine_id} had it for {took}, and did not report what it did until it was lost or told to abort"
    if number == 1:
        return f"no long wait: {engine_id} computed the prompt of {record.num_prompt_tokens} tokens for {took}"
    gap = "" if record.itl_p50_s is None else f", {in_words(record.itl_p50_s)} between tokens (median)"
    return f"no long wait: {engine_id} generated {record.num_output_tokens} tokens for {took}{gap}"
