"""Names what made a request slow: the longest time that it waited or lost, or else the longest work, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from cluster.observability.stories.request_story import Phase, PhaseSpan
from cluster.routing.request_record import AttemptRecord, RequestRecord

_MIN_PART: Final = 0.2
"""A wait is the cause if it took this part of the request's time."""
_MIN_PART_OF_TTFT: Final = 0.5
"""A wait before the first token is the cause as well if it took this part of the time to the first token."""
_MIN_OF_TTFT_S: Final = 0.1


class _Loss(msgspec.Struct, frozen=True):
    """A time in which nothing was computed that counted. is_before_token: whether the first token came later"""

    seconds: float
    text: str
    is_before_token: bool = False


def find_cause(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return the cause in words.

    spans:      of the whole request
    duration_s: from the request's arrival to its end, or up to now
    """
    if not record.attempts:
        return f"no engine has had it: it spent {in_words(duration_s)} at the ingress"
    losses = [one for one in _losses(record, spans, duration_s) if _counts(one, duration_s, record.ttft_s)]
    if losses:
        return max(losses, key=lambda one: one.seconds).text
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
    newest = max((span.attempt for span in spans), default=0)
    of_last = [span for span in spans if span.attempt == newest]
    yield _Loss(
        record.attempts[0].began_s,
        f"spent {in_words(record.attempts[0].began_s)} at the ingress before an engine got it: admission, tokenization",
        is_before_token=True,
    )
    yield from _queues(last, of_last, duration_s, is_first=len(record.attempts) == 1)
    for span in of_last:
        if span.phase is Phase.TRANSFER_EXPOSED:
            yield _Loss(span.seconds(duration_s), _transfer(last, span, duration_s))
        elif span.phase is Phase.BATCH:
            waited = in_words(span.seconds(duration_s))
            text = f"waited {waited} for the batch of {span.engine_id}: its KV was there, and the batch was full"
            yield _Loss(span.seconds(duration_s), text)
    yield from _preemptions(record, spans, duration_s)
    yield from _unread(last, of_last, record)


def _failures(record: RequestRecord, duration_s: float) -> Iterator[_Loss]:
    """Yield the cost of each failed attempt: all of it if it brought no token, and the time until tokens came."""
    following: Iterable[AttemptRecord | None] = [*record.attempts[1:], None]
    num_tokens = 0
    for attempt, successor in zip(record.attempts, following, strict=True):
        num_tokens += attempt.num_new_tokens
        if attempt.prefill_failure:
            lost_s = (attempt.first_token_s or duration_s) - attempt.began_s
            text = f"{attempt.prefill_failure}: {attempt.decode_engine_ids[-1]} computed the prompt itself"
            yield _Loss(lost_s, f"{text}, and the first token came {in_words(lost_s)} after the submission")
        if attempt.ended_s is None:
            continue
        began_s = attempt.ended_s if attempt.num_new_tokens else attempt.began_s
        if successor is None:
            yield _Loss(duration_s - began_s, f"{attempt.failure}; no other engine continued it")
            continue
        resumed_s = successor.first_token_s if successor.first_token_s is not None else duration_s
        engine_id = successor.decode_engine_ids[-1]
        went_on = f"resumed from token {num_tokens}" if num_tokens else "began again"
        # Before the ingress notices that an engine is lost, the client has waited as well.
        silent_s = (record.itl_max_s or 0.0) if attempt.num_new_tokens else 0.0
        lost_s = max(resumed_s - began_s, silent_s)
        yield _Loss(lost_s, f"{attempt.failure}; {went_on} on {engine_id}, which cost {in_words(lost_s)}")


def _queues(attempt: AttemptRecord, spans: list[PhaseSpan], duration_s: float, *, is_first: bool) -> Iterator[_Loss]:
    seconds = {Phase.QUEUE: 0.0, Phase.RESERVATION: 0.0}
    engines = dict.fromkeys(seconds, "")
    for span in spans:
        if span.phase in seconds:
            seconds[span.phase] += span.seconds(duration_s)
            engines[span.phase] = span.engine_id
    reserved_s = seconds[Phase.RESERVATION]
    # A producer begins once its consumer has reserved blocks: this part of its queue is the consumer's.
    queued_s = seconds[Phase.QUEUE] - reserved_s
    terms = None if attempt.decision is None else attempt.decision.chosen
    predicted = "" if terms is None else f", where {in_words(terms.prefill_wait_s)} were predicted"
    queue = f"waited {in_words(queued_s)} in the queue of {engines[Phase.QUEUE]}{predicted}"
    yield _Loss(queued_s, f"{queue}: other requests came first", is_before_token=is_first)
    reservation = f"waited {in_words(reserved_s)} until {engines[Phase.RESERVATION]} reserved blocks"
    yield _Loss(reserved_s, f"{reservation}: its KV cache or its batch was full", is_before_token=is_first)


def _transfer(attempt: AttemptRecord, span: PhaseSpan, duration_s: float) -> str:
    exposed, times = in_words(span.seconds(duration_s)), attempt.decode
    if times is None or not times.transfer_s:
        return f"waited {exposed} for KV that {span.engine_id} fetched from another engine"
    rate, size = times.num_transferred_bytes / times.transfer_s / 1e6, times.num_transferred_bytes / 1e6
    route = f"from {attempt.prefill_engine_id} to {span.engine_id}"
    return f"transfer exposed for {exposed}: {size:.1f} MB {route} at {rate:.1f} MB/s"


def _preemptions(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> Iterator[_Loss]:
    preempted = [span for span in spans if span.phase is Phase.PREEMPTED]
    seconds = sum(span.seconds(duration_s) for span in preempted)
    if preempted:
        times = {1: "once", 2: "twice"}.get(len(preempted), f"{len(preempted)} times")
        engines = ", ".join(dict.fromkeys(span.engine_id for span in preempted))
        yield _Loss(seconds, f"{engines} had no free blocks: preempted {times}, for {in_words(seconds)} in all")
    for attempt in record.attempts:
        if attempt.moved_s and record.itl_max_s:
            route = " to ".join(attempt.decode_engine_ids)
            text = f"{attempt.decode_engine_ids[0]} had no free blocks: migrated from {route}"
            yield _Loss(record.itl_max_s, f"{text}, with {in_words(record.itl_max_s)} between two tokens")


def _unread(attempt: AttemptRecord, spans: list[PhaseSpan], record: RequestRecord) -> Iterator[_Loss]:
    """Yield the time after the engine's end, if the engine has reported one: the client reads no faster."""
    if attempt.decode is None or not attempt.decode.statuses or record.duration_s is None or attempt.moved_s:
        return
    ended_s = attempt.began_s + attempt.decode.statuses[-1].at_s
    unread_s = record.duration_s - ended_s
    yield _Loss(unread_s, f"the client took {in_words(unread_s)} to read on after the last token was generated")


def _work(record: RequestRecord, spans: tuple[PhaseSpan, ...], duration_s: float) -> str:
    """Return which work took longest, for a request that waited for nothing in particular."""
    seconds: dict[tuple[Phase, str], float] = {}
    for span in spans:
        if span.phase in (Phase.PREFILL, Phase.DECODE, Phase.UNREPORTED):
            key = span.phase, span.engine_id
            seconds[key] = seconds.get(key, 0.0) + span.seconds(duration_s)
    if not seconds:
        return f"nothing took long: {in_words(duration_s)} in all"
    (phase, engine_id), longest_s = max(seconds.items(), key=lambda item: item[1])
    took = f"{in_words(longest_s)} of {in_words(duration_s)}"
    if phase is Phase.UNREPORTED:
        return f"{engine_id} has had it for {took}; engines report at their end what they did"
    if phase is Phase.PREFILL:
        return f"no long wait: {engine_id} computed the prompt of {record.num_prompt_tokens} tokens for {took}"
    gap = "" if record.itl_p50_s is None else f", {in_words(record.itl_p50_s)} between tokens (median)"
    return f"no long wait: {engine_id} generated {record.num_output_tokens} tokens for {took}{gap}"
