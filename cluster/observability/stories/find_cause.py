"""Names what made a request slow: the longest time that it waited or lost, or else the longest work, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import msgspec

from cluster.observability.stories.request_story import Phase, PhaseSpan
from cluster.routing.request_record import AttemptRecord, RequestRecord

_MIN_PART: Final = 0.2
"""A wait is the cause if it took this part of the request's time."""
_MIN_PART_OF_TTFT: Final = 0.5
"""A wait before the first token is the cause as well if it took this part of the time to the first token."""
_MIN_OF_TTFT_S: Final = 0.1

# To read a member of an enum costs as much as to make a span.
_QUEUE: Final = Phase.QUEUE
_RESERVATION: Final = Phase.RESERVATION
_TRANSFER_EXPOSED: Final = Phase.TRANSFER_EXPOSED
_BATCH: Final = Phase.BATCH
_PREEMPTED: Final = Phase.PREEMPTED
_PREFILL: Final = Phase.PREFILL
_UNREPORTED: Final = Phase.UNREPORTED
_WORK: Final = frozenset({Phase.PREFILL, Phase.DECODE, Phase.UNREPORTED})


class _Loss(msgspec.Struct, frozen=True):
    """A time in which nothing was computed that counted.

    describe:        returns the loss in words, which only the cause's are needed of
    is_before_token: whether the first token came later
    """

    seconds: float
    describe: Callable[[], str]
    is_before_token: bool = False


def find_cause(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return the cause in words.

    spans:      of the whole request
    duration_s: from the request's arrival to its end, or up to now
    """
    if not record.attempts:
        return f"no engine has had it: it spent {in_words(duration_s)} at the ingress"
    longest: _Loss | None = None
    for loss in _losses(record, spans, duration_s):
        is_longer = longest is None or loss.seconds > longest.seconds
        if is_longer and _counts(loss, duration_s, record.ttft_s):
            longest = loss
    if longest is not None:
        return longest.describe()
    failed = next((one.failure for one in record.attempts if one.failure), "")
    return _work(record, spans, duration_s) + (f"; on the way, {failed}" if failed else "")


def in_words(seconds: float) -> str:
    """Return a duration in s, ms or us."""
    if 0 < abs(seconds) < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _counts(loss: _Loss, duration_s: float, ttft_s: float | None) -> bool:
    if loss.seconds > 0 and loss.seconds >= _MIN_PART * duration_s:
        return True
    if not loss.is_before_token or ttft_s is None:
        return False
    return loss.seconds >= max(_MIN_OF_TTFT_S, _MIN_PART_OF_TTFT * ttft_s)


def _losses(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> Iterator[_Loss]:
    yield from _failures(record, duration_s)
    last = record.attempts[-1]
    newest = max([span.attempt for span in spans], default=0)
    of_last = [span for span in spans if span.attempt == newest]
    admitted_s = record.attempts[0].began_s
    yield _Loss(
        admitted_s,
        lambda: f"spent {in_words(admitted_s)} at the ingress before an engine got it: admission, tokenization",
        is_before_token=True,
    )
    yield from _queues(last, of_last, duration_s, is_first=len(record.attempts) == 1)
    for span in of_last:
        if span.phase is _TRANSFER_EXPOSED:
            yield _Loss(span.seconds(duration_s), partial(_transfer, last, span, duration_s))
        elif span.phase is _BATCH:
            yield _Loss(span.seconds(duration_s), partial(_batch, span, duration_s))
    yield from _preemptions(record, spans, duration_s)
    yield from _unread(last, record)


def _failures(record: RequestRecord, duration_s: float) -> Iterator[_Loss]:
    """Yield the cost of each failed attempt: all of it if it brought no token, and the time until tokens came."""
    num_tokens = 0
    for index, attempt in enumerate(record.attempts):
        num_tokens += attempt.num_new_tokens
        if attempt.prefill_failure:
            lost_s = (attempt.first_token_s or duration_s) - attempt.began_s
            yield _Loss(lost_s, partial(_prefill_failure, attempt, lost_s))
        if attempt.ended_s is None:
            continue
        began_s = attempt.ended_s if attempt.num_new_tokens else attempt.began_s
        if index + 1 == len(record.attempts):
            yield _Loss(duration_s - began_s, partial("{}; no other engine continued it".format, attempt.failure))
            continue
        successor = record.attempts[index + 1]
        resumed_s = successor.first_token_s if successor.first_token_s is not None else duration_s
        # Before the ingress notices that an engine is lost, the client has waited as well.
        silent_s = (record.itl_max_s or 0.0) if attempt.num_new_tokens else 0.0
        lost_s = max(resumed_s - began_s, silent_s)
        yield _Loss(lost_s, partial(_recovered, attempt, successor, num_tokens, lost_s))


def _prefill_failure(attempt: AttemptRecord, lost_s: float) -> str:
    text = f"{attempt.prefill_failure}: {attempt.decode_engine_ids[-1]} computed the prompt itself"
    return f"{text}, and the first token came {in_words(lost_s)} after the submission"


def _recovered(attempt: AttemptRecord, successor: AttemptRecord, num_tokens: int, lost_s: float) -> str:
    went_on = f"resumed from token {num_tokens}" if num_tokens else "began again"
    return f"{attempt.failure}; {went_on} on {successor.decode_engine_ids[-1]}, which cost {in_words(lost_s)}"


def _queues(attempt: AttemptRecord, spans: list[PhaseSpan], duration_s: float, *, is_first: bool) -> Iterator[_Loss]:
    queued_s = reserved_s = 0.0
    queue = reservation = ""
    for span in spans:
        if span.phase is _QUEUE:
            queued_s += span.seconds(duration_s)
            queue = span.engine_id
        elif span.phase is _RESERVATION:
            reserved_s += span.seconds(duration_s)
            reservation = span.engine_id
    # A producer begins once its consumer has reserved blocks: this part of its queue is the consumer's.
    queued_s -= reserved_s
    yield _Loss(queued_s, partial(_queue, attempt, queue, queued_s), is_before_token=is_first)
    yield _Loss(reserved_s, partial(_reservation, reservation, reserved_s), is_before_token=is_first)


def _queue(attempt: AttemptRecord, engine_id: str, queued_s: float) -> str:
    terms = None if attempt.decision is None else attempt.decision.chosen
    predicted = "" if terms is None else f", where {in_words(terms.prefill_wait_s)} were predicted"
    return f"waited {in_words(queued_s)} in the queue of {engine_id}{predicted}: other requests came first"


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


def _preemptions(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> Iterator[_Loss]:
    preempted = [span for span in spans if span.phase is _PREEMPTED]
    if preempted:
        seconds = sum(span.seconds(duration_s) for span in preempted)
        yield _Loss(seconds, partial(_preempted, preempted, seconds))
    for attempt in record.attempts:
        if attempt.moved_s and record.itl_max_s:
            yield _Loss(record.itl_max_s, partial(_moved, attempt, record.itl_max_s))


def _preempted(spans: list[PhaseSpan], seconds: float) -> str:
    times = {1: "once", 2: "twice"}.get(len(spans), f"{len(spans)} times")
    engines = ", ".join(dict.fromkeys(span.engine_id for span in spans))
    return f"{engines} had no free blocks: preempted {times}, for {in_words(seconds)} in all"


def _moved(attempt: AttemptRecord, gap_s: float) -> str:
    route = " to ".join(attempt.decode_engine_ids)
    text = f"{attempt.decode_engine_ids[0]} had no free blocks: migrated from {route}"
    return f"{text}, with {in_words(gap_s)} between two tokens"


def _unread(attempt: AttemptRecord, record: RequestRecord) -> Iterator[_Loss]:
    """Yield the time after the engine's end, if the engine has reported one: the client reads no faster."""
    if attempt.decode is None or not attempt.decode.statuses or record.duration_s is None or attempt.moved_s:
        return
    unread_s = record.duration_s - attempt.began_s - attempt.decode.statuses[-1].at_s
    yield _Loss(
        unread_s,
        lambda: f"the client took {in_words(unread_s)} to read on after the last token was generated",
    )


def _work(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return which work took longest, for a request that waited for nothing in particular."""
    seconds: dict[tuple[Phase, str], float] = {}
    for span in spans:
        if span.phase in _WORK:
            key = span.phase, span.engine_id
            seconds[key] = seconds.get(key, 0.0) + span.seconds(duration_s)
    if not seconds:
        return f"nothing took long: {in_words(duration_s)} in all"
    (phase, engine_id), longest_s = max(seconds.items(), key=lambda item: item[1])
    took = f"{in_words(longest_s)} of {in_words(duration_s)}"
    if phase is _UNREPORTED:
        return f"{engine_id} has had it for {took}; engines report at their end what they did"
    if phase is _PREFILL:
        return f"no long wait: {engine_id} computed the prompt of {record.num_prompt_tokens} tokens for {took}"
    gap = "" if record.itl_p50_s is None else f", {in_words(record.itl_p50_s)} between tokens (median)"
    return f"no long wait: {engine_id} generated {record.num_output_tokens} tokens for {took}{gap}"
