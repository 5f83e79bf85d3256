"""Counts the requests of an ingress: per model, and the attempts of all.

Only the gaps between tokens are counted as the tokens come; everything else is counted once, at a request's end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self

from prometheus_client.metrics_core import Metric

from actors.core.requests.request_status import FinishReason
from cluster.observability.prometheus import buckets
from cluster.observability.prometheus.declaration import Declaration, counter, histogram
from cluster.observability.prometheus.histogram import Histogram
from cluster.routing.request_record import AttemptRecord, RequestRecord

_ANSWERED: Final = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})
_PHASES: Final = ("prefill", "decode")
_REROUTED: Final = ("prefill", "rerouted")
_OUTCOMES: Final = ("completed", "cancelled", "failed")
_CLIENTS_END: Final = frozenset({"cancelled", "deadline"})

REQUESTS: Final = counter("raypd_requests_total", "Requests that have ended, by outcome.", "model", "outcome")
PROMPT_TOKENS: Final = counter(
    "raypd_prompt_tokens_total", "Prompt tokens of requests that have ended with a finish reason.", "model"
)
CACHED_TOKENS: Final = counter(
    "raypd_cached_prompt_tokens_total",
    "Prompt tokens that came from a prefix cache; they are part of raypd_prompt_tokens_total.",
    "model",
)
OUTPUT_TOKENS: Final = counter("raypd_output_tokens_total", "Output tokens that were sent to clients.", "model")
PREEMPTIONS: Final = counter(
    "raypd_request_preemptions_total",
    "How often requests that have ended lost their blocks to other requests, by the reports of their last engines.",
    "model",
)
ATTEMPTS: Final = counter(
    "raypd_attempts_total",
    "Attempts of requests that have ended. phase: prefill if the attempt gave no token, else decode. outcome: "
    "completed; retried, if it failed and another one followed; rerouted, if its prompt waited and went to an engine "
    "that had run out of prompts; cancelled by the client or its deadline; failed.",
    "phase",
    "outcome",
)
RETRIES: Final = counter(
    "raypd_retries_total",
    "Attempts that followed a failed one. phase: the phase that the failed attempt ended in. outcome: how the request "
    "ended: completed, cancelled by the client or its deadline, or failed.",
    "phase",
    "outcome",
)
MIGRATIONS: Final = counter(
    "raypd_migrations_total",
    "Migrations of preempted requests, counted at a request's end. phase: prefill if the attempt gave no token, else "
    "decode. outcome: how the request ended: completed, cancelled by the client or its deadline, or failed.",
    "phase",
    "outcome",
)


def _times(name: str, meaning: str, bounds: tuple[float, ...]) -> Declaration:
    return histogram(name, meaning, "model", unit="s", buckets=bounds)


TTFT: Final = _times(
    "raypd_time_to_first_token_seconds", "Time from a request's arrival to its first token.", buckets.TTFT_S
)
ITL: Final = _times(
    "raypd_inter_token_latency_seconds",
    "Time between consecutive output tokens of a request; tokens that come together share their time.",
    buckets.TOKEN_GAP_S,
)
E2E: Final = _times("raypd_request_duration_seconds", "Time from a request's arrival to its end.", buckets.REQUEST_S)
TPOT: Final = _times(
    "raypd_request_time_per_output_token_seconds",
    "Mean time between the output tokens of one request that has ended with a finish reason.",
    buckets.TOKEN_GAP_S,
)
QUEUE: Final = _times(
    "raypd_request_queue_seconds",
    "Time that a request waited at the engine that computed its prompt, of requests with a finish reason.",
    buckets.PHASE_S,
)
PREFILL: Final = _times(
    "raypd_request_prefill_seconds",
    "Time from the begin of a prompt's computation to the first token, of requests with a finish reason.",
    buckets.PHASE_S,
)
DECODE: Final = _times(
    "raypd_request_decode_seconds",
    "Time from the first to the last output token, of requests with a finish reason.",
    buckets.PHASE_S,
)
INFERENCE: Final = _times(
    "raypd_request_inference_seconds",
    "Time from the begin of a prompt's computation to the last output token, of requests with a finish reason.",
    buckets.PHASE_S,
)
TRANSFER: Final = _times(
    "raypd_transfer_duration_seconds",
    "Duration of the KV transfer of one attempt: from its first chunk to the arrival of its last block.",
    buckets.TRANSFER_S,
)
EXPOSED: Final = _times(
    "raypd_transfer_exposed_duration_seconds",
    "Part of raypd_transfer_duration_seconds after the end of prefill, for which the client waits.",
    buckets.TRANSFER_S,
)
TRANSFER_BYTES: Final = histogram(
    "raypd_transfer_size_bytes",
    "Bytes of KV that one attempt transferred.",
    "model",
    unit="bytes",
    buckets=buckets.TRANSFER_BYTES,
)
PROMPT_LENGTH: Final = histogram(
    "raypd_request_prompt_tokens",
    "Prompt tokens of one request that has ended with a finish reason.",
    "model",
    unit="tokens",
    buckets=buckets.TOKENS,
)
OUTPUT_LENGTH: Final = histogram(
    "raypd_request_output_tokens",
    "Output tokens of one request that has ended with a finish reason.",
    "model",
    unit="tokens",
    buckets=buckets.TOKENS,
)
COMPUTED_LENGTH: Final = histogram(
    "raypd_request_computed_prompt_tokens",
    "Prompt tokens of one request that an engine computed, as no cache had them, of requests with a finish reason.",
    "model",
    unit="tokens",
    buckets=buckets.TOKENS,
)
MAX_TOKENS: Final = histogram(
    "raypd_request_max_tokens",
    "The most output tokens that one request allows (max_tokens), of requests with a finish reason.",
    "model",
    unit="tokens",
    buckets=buckets.TOKENS,
)

_COUNTERS: Final = (REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, PREEMPTIONS)
HISTOGRAMS: Final = (
    *(TTFT, ITL, E2E, TPOT, QUEUE, PREFILL, DECODE, TRANSFER, EXPOSED, TRANSFER_BYTES, PROMPT_LENGTH, OUTPUT_LENGTH),
    *(COMPUTED_LENGTH, INFERENCE, MAX_TOKENS),
)
DECLARATIONS: Final = (*_COUNTERS, *HISTOGRAMS, ATTEMPTS, RETRIES, MIGRATIONS)


class ModelFigures:
    """The counters and histograms of the requests for one model: the base model, or one adapter."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.histograms: Mapping[str, Histogram] = {one.name: Histogram(one.buckets) for one in HISTOGRAMS}
        self._ttft_s, self._itl_s = self.histograms[TTFT.name], self.histograms[ITL.name]

    @classmethod
    def merged(cls, several: Iterable[ModelFigures]) -> Self:
        """Return the sums of the figures of several models, for reading only."""
        models, whole = list(several), cls()
        for one in models:
            whole.outcomes.update(one.outcomes)
            whole.num_prompt_tokens += one.num_prompt_tokens
            whole.num_cached_tokens += one.num_cached_tokens
            whole.num_output_tokens += one.num_output_tokens
            whole.num_preemptions += one.num_preemptions
        whole.histograms = {
            each.name: Histogram.merged(each.buckets, (one.histograms[each.name] for one in models))
            for each in HISTOGRAMS
        }
        return whole

    def on_first_tokens(self, num_tokens: int, ttft_s: float) -> None:
        """Count the first tokens of a request. ttft_s: time since the request's arrival"""
        self.num_output_tokens += num_tokens
        self._ttft_s.observe(ttft_s)

    def on_next_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Count further tokens of a request. gap_s: time since its previous tokens, divided among these tokens"""
        self.num_output_tokens += num_tokens
        for _ in range(num_tokens):
            self._itl_s.observe(gap_s / num_tokens)

    def on_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt of a request that has ended with a finish reason."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def on_end(self, outcome: str, e2e_s: float) -> None:
        """Count a request that has ended.

        outcome: its finish reason; "done" if it has none; outcome_of() the error if it failed
        e2e_s:   time since the request's arrival
        """
        self.outcomes[outcome] += 1
        self.histograms[E2E.name].observe(e2e_s)

    def on_record(self, record: RequestRecord, tpot_s: float | None) -> None:
        """Count the phases, the lengths, the transfers and the preemptions of a request that has ended.

        record: of a request that engines had
        tpot_s: mean time between its output tokens, in seconds; None if it has fewer than two
        """
        for attempt in record.attempts:
            for times in (attempt.prefill, attempt.decode):
                self.num_preemptions += 0 if times is None else times.num_preemptions
        for declaration, value in _measured(record, tpot_s):
            self.histograms[declaration.name].observe(value)

    def show_trace(self, record: RequestRecord, tpot_s: float | None, trace_id: str) -> None:
        """Keep a request's trace as the example of the buckets that its values are in, also that of its longest gap.

        record, tpot_s: as on_record() has counted them; trace_id: 32 hexadecimal digits
        """
        of_tokens = ((TTFT, record.ttft_s), (ITL, record.itl_max_s), (E2E, record.duration_s))
        ended_s = record.arrived_at_s + (record.duration_s or 0.0)
        for declaration, value in (*of_tokens, *_measured(record, tpot_s)):
            if value is not None:
                self.histograms[declaration.name].show(value, trace_id, ended_s)


class AttemptFigures:
    """The counters of the attempts of all requests."""

    def __init__(self) -> None:
        ends = list(itertools.product(_PHASES, _OUTCOMES))
        self._attempts = Counter(dict.fromkeys([*ends, *((phase, "retried") for phase in _PHASES), _REROUTED], 0))
        self._retries = Counter(dict.fromkeys(ends, 0))
        self._migrations = Counter(dict.fromkeys(ends, 0))

    def add(self, record: RequestRecord) -> None:
        """Count the attempts of a request that has ended."""
        if not record.attempts:
            return
        outcome = _outcome(record)
        *failed, last = record.attempts
        self._attempts[_phase(last), outcome] += 1
        # Of very many attempts the record has the first and the last ones; those between failed like the first one.
        for attempt in [*failed, *[record.attempts[0]] * record.num_attempts_left_out]:
            self._attempts[_phase(attempt), "rerouted" if attempt.was_left else "retried"] += 1
            self._retries[_phase(attempt), outcome] += not attempt.was_left
        for attempt in record.attempts:
            self._migrations[_phase(attempt), outcome] += len(attempt.moved_s)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield ATTEMPTS.of(self._attempts.items())
        yield RETRIES.of(self._retries.items())
        yield MIGRATIONS.of(self._migrations.items())


def collect_models(models: Mapping[str, ModelFigures]) -> Iterator[Metric]:
    """Yield the metrics of all models. models: by the value of the label `model`"""
    yield REQUESTS.of(((name, outcome), n) for name, one in models.items() for outcome, n in one.outcomes.items())
    yield PROMPT_TOKENS.of(((name,), one.num_prompt_tokens) for name, one in models.items())
    yield CACHED_TOKENS.of(((name,), one.num_cached_tokens) for name, one in models.items())
    yield OUTPUT_TOKENS.of(((name,), one.num_output_tokens) for name, one in models.items())
    yield PREEMPTIONS.of(((name,), one.num_preemptions) for name, one in models.items())
    for declaration in HISTOGRAMS:
        yield declaration.histograms(((name,), one.histograms[declaration.name]) for name, one in models.items())


def _measured(record: RequestRecord, tpot_s: float | None) -> Iterator[tuple[Declaration, float]]:
    """Yield what is counted of a record, with the histogram that counts it."""
    for attempt in record.attempts:
        if attempt.decode is not None and attempt.decode.num_transferred_bytes:
            yield TRANSFER, attempt.decode.transfer_s
            yield EXPOSED, attempt.decode.exposed_transfer_s
            yield TRANSFER_BYTES, attempt.decode.num_transferred_bytes
    if record.outcome not in _ANSWERED:
        return
    yield PROMPT_LENGTH, record.num_prompt_tokens
    yield OUTPUT_LENGTH, record.num_output_tokens
    if record.max_tokens:
        yield MAX_TOKENS, record.max_tokens
    decode_s = 0.0 if tpot_s is None else tpot_s * (record.num_output_tokens - 1)
    computing = next((one.computing for one in record.attempts if one.num_new_tokens), None)
    if computing is not None:
        yield QUEUE, record.left_queues_s + computing.queued_s
        yield PREFILL, computing.prefill_s
        yield COMPUTED_LENGTH, computing.num_prompt_tokens_computed
        yield INFERENCE, computing.prefill_s + decode_s
    if tpot_s is not None:
        yield TPOT, tpot_s
        yield DECODE, decode_s


def _phase(attempt: AttemptRecord) -> str:
    return "decode" if attempt.num_new_tokens else "prefill"


def _outcome(record: RequestRecord) -> str:
    if record.outcome in _ANSWERED:
        return "completed"
    return "cancelled" if record.outcome in _CLIENTS_END else "failed"
