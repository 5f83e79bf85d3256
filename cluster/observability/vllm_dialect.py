"""Tells an ingress's load under vLLM's names, for tools that know only those.

Such tools read one series of a name and take it for the whole server: an endpoint picker of the Gateway API Inference
Extension takes the first one. So each name has one series here, with this ingress's own counts; its engines are the
router's business. A picker asks many times a second, for gauges: these are made ten times a second at most, and the
counters and histograms, which take ten times as long, once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client.metrics_core import Metric

from actors.core.requests.request_status import FinishReason
from cluster.observability.load_counts import NOTHING_IN_FLIGHT, RequestLoad
from cluster.observability.metrics import ServingMetrics
from cluster.observability.prometheus import request_figures as figures
from cluster.observability.prometheus.declaration import Declaration, counter, gauge, histogram
from cluster.observability.prometheus.exposition import TextTemplate, to_text
from cluster.observability.prometheus.histogram import Histogram
from cluster.observability.prometheus.request_figures import ModelFigures

_MAX_LOAD_AGE_S: Final = 0.1
_MAX_COUNTS_AGE_S: Final = 1.0
_MAX_ADAPTERS: Final = 64
_LABELS: Final = ("model_name", "engine")
_REASONS: Final = (FinishReason.STOP.value, FinishReason.LENGTH.value)
_ENGINE: Final = "0"

_WAITING: Final = gauge(
    "vllm:num_requests_waiting", "Requests of this ingress that have no output token yet.", *_LABELS
)
_RUNNING: Final = gauge("vllm:num_requests_running", "Requests of this ingress that have output tokens.", *_LABELS)
_USAGE: Final = gauge(
    "vllm:kv_cache_usage_perc", "Mean part of the KV cache's blocks in use at engines that decode, 0 to 1.", *_LABELS
)
_CACHE: Final = gauge(
    "vllm:cache_config_info",
    "1, with the block size in tokens and the blocks of all engines together as labels.",
    *("block_size", "num_gpu_blocks", "engine"),
)
_ADAPTERS: Final = gauge(
    "vllm:lora_requests_info",
    f"Unix time, with the adapters of requests in flight as labels, the first {_MAX_ADAPTERS}; once there are any.",
    *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
_SUCCESS: Final = counter(
    "vllm:request_success_total", "Requests that have ended with a finish reason.", *_LABELS, "finished_reason"
)
_PROMPT_TOKENS: Final = counter("vllm:prompt_tokens_total", "Like raypd_prompt_tokens_total.", *_LABELS)
_OUTPUT_TOKENS: Final = counter("vllm:generation_tokens_total", "Like raypd_output_tokens_total.", *_LABELS)
_QUERIES: Final = counter("vllm:prefix_cache_queries_total", "Like raypd_prompt_tokens_total.", *_LABELS, unit="tokens")
_HITS: Final = counter(
    "vllm:prefix_cache_hits_total", "Like raypd_cached_prompt_tokens_total.", *_LABELS, unit="tokens"
)
_PREEMPTIONS: Final = counter("vllm:num_preemptions_total", "Like raypd_request_preemptions_total.", *_LABELS)
_HISTOGRAMS: Final = tuple(
    (
        histogram(f"vllm:{name}", f"Like {one.name}.", *_LABELS, unit=one.unit, buckets=one.buckets),
        one,
    )
    for name, one in (
        ("time_to_first_token_seconds", figures.TTFT),
        ("inter_token_latency_seconds", figures.ITL),
        ("request_time_per_output_token_seconds", figures.TPOT),
        ("e2e_request_latency_seconds", figures.E2E),
        ("request_queue_time_seconds", figures.QUEUE),
        ("request_prefill_time_seconds", figures.PREFILL),
        ("request_decode_time_seconds", figures.DECODE),
        ("request_inference_time_seconds", figures.INFERENCE),
        ("request_prompt_tokens", figures.PROMPT_LENGTH),
        ("request_generation_tokens", figures.OUTPUT_LENGTH),
        ("request_max_num_generation_tokens", figures.OUTPUT_LENGTH),
        ("request_params_max_tokens", figures.MAX_TOKENS),
        ("request_prefill_kv_computed_tokens", figures.COMPUTED_LENGTH),
    )
)
DECLARATIONS: Final[tuple[Declaration, ...]] = (
    *(_WAITING, _RUNNING, _USAGE, _CACHE, _ADAPTERS, _SUCCESS, _PROMPT_TOKENS, _OUTPUT_TOKENS, _QUERIES, _HITS),
    _PREEMPTIONS,
    *(declaration for declaration, _ in _HISTOGRAMS),
)


@dataclass(frozen=True, slots=True)
class IngressLoad:
    """The load that an ingress tells under vLLM's names.

    kv_cache_usage: mean over the engines that decode, 0 to 1
    block_size:     tokens
    num_blocks:     of all engines together
    max_adapters:   how many adapters an engine keeps loaded; 0 if no adapters are served
    """

    requests: RequestLoad = NOTHING_IN_FLIGHT
    kv_cache_usage: float = 0.0
    block_size: int = 0
    num_blocks: int = 0
    max_adapters: int = 0


class _Text:
    """A text whose series stay the same, so that only their values are written anew."""

    def __init__(self) -> None:
        """Begin without a text."""
        self.made_s = -math.inf
        """When the text was made."""
        self.text = b""
        self._series: object = None
        self._template = TextTemplate([])

    def make(self, now_s: float, series: object, metrics: Callable[[], Iterable[Metric]], values: list[float]) -> None:
        """Make the text.

        series:  equal to those of the text before if the two have the same series
        metrics: returns the metrics, with any values
        values:  in the order of the metrics' samples
        """
        if series != self._series:
            self._template, self._series = TextTemplate(metrics()), series
        self.text, self.made_s = self._template.text(values), now_s


class VllmDialect:
    """The text with vLLM's names. It belongs to the ingress's event loop."""

    def __init__(
        self,
        metrics: ServingMetrics,
        load: Callable[[], IngressLoad],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Make no text yet. load: the load now; clock: monotonic seconds; wall_clock: Unix time in seconds"""
        self._metrics = metrics
        self._load = load
        self._clock = clock
        self._wall_clock = wall_clock
        self._has_had_adapters = False
        self._load_texts = {False: _Text(), True: _Text()}
        """The texts of the load, by whether they name adapters."""
        self._counts_text = _Text()

    def text(self, *, names_adapters: bool = True) -> bytes:
        """Return the metrics in Prometheus' text format: the load at most 0.1 s old, all else at most 1 s old.

        names_adapters: whether the reader may know of all adapters; otherwise none is named
        """
        now_s, load, counts = self._clock(), self._load_texts[names_adapters], self._counts_text
        if now_s - load.made_s >= _MAX_LOAD_AGE_S:
            self._make_load(load, now_s, names_adapters=names_adapters)
        if now_s - counts.made_s >= _MAX_COUNTS_AGE_S:
            counts.make(now_s, self._metrics.model_name, self._collect_counts, self._values_of_counts())
        return load.text + counts.text

    def collect(self, *, names_adapters: bool = True) -> Iterator[Metric]:
        """Yield the metrics as they are now. names_adapters: as for text()"""
        yield from self._collect_load(self._load(), names_adapters=names_adapters)
        yield from self._collect_counts()

    def _make_load(self, text: _Text, now_s: float, *, names_adapters: bool) -> None:
        load = self._load()
        if self._tells_adapters(load) and names_adapters:
            # Adapters are labels, which change.
            text.text, text.made_s = to_text(self._collect_load(load, names_adapters=True)), now_s
            return
        values = [load.requests.num_waiting, load.requests.num_running, load.kv_cache_usage]
        text.make(
            now_s,
            (self._metrics.model_name, load.block_size, load.num_blocks),
            partial(self._collect_load, load, names_adapters=names_adapters),
            [*values, 1.0] if load.num_blocks else values,
        )

    def _collect_load(self, load: IngressLoad, *, names_adapters: bool) -> Iterator[Metric]:
        requests, labels = load.requests, (self._metrics.model_name, _ENGINE)
        yield _WAITING.of([(labels, requests.num_waiting)])
        yield _RUNNING.of([(labels, requests.num_running)])
        yield _USAGE.of([(labels, load.kv_cache_usage)])
        if load.num_blocks:
            yield _CACHE.of([((str(load.block_size), str(load.num_blocks), _ENGINE), 1.0)])
        if self._tells_adapters(load) and names_adapters:
            names = (_listed(requests.running_adapters), _listed(requests.waiting_adapters))
            yield _ADAPTERS.of([((str(load.max_adapters), *names), self._wall_clock())])

    def _tells_adapters(self, load: IngressLoad) -> bool:
        self._has_had_adapters |= bool(load.requests.waiting_adapters or load.requests.running_adapters)
        return self._has_had_adapters

    def _values_of_counts(self) -> list[float]:
        """Return the values of _collect_counts(), in its order."""
        models = list(self._metrics.models().values())
        num_prompt_tokens = sum(one.num_prompt_tokens for one in models)
        values: list[float] = [sum(one.outcomes[reason] for one in models) for reason in _REASONS]
        values += [num_prompt_tokens, sum(one.num_output_tokens for one in models)]
        values += [num_prompt_tokens, sum(one.num_cached_tokens for one in models)]
        values.append(sum(one.num_preemptions for one in models))
        for _, own in _HISTOGRAMS:
            values += _merged(own, models).values()
        return values

    def _collect_counts(self) -> Iterator[Metric]:
        labels = (self._metrics.model_name, _ENGINE)
        models = list(self._metrics.models().values())
        yield _SUCCESS.of(((*labels, reason), sum(one.outcomes[reason] for one in models)) for reason in _REASONS)
        num_prompt_tokens = sum(one.num_prompt_tokens for one in models)
        yield _PROMPT_TOKENS.of([(labels, num_prompt_tokens)])
        yield _OUTPUT_TOKENS.of([(labels, sum(one.num_output_tokens for one in models))])
        yield _QUERIES.of([(labels, num_prompt_tokens)])
        yield _HITS.of([(labels, sum(one.num_cached_tokens for one in models))])
        yield _PREEMPTIONS.of([(labels, sum(one.num_preemptions for one in models))])
        for declaration, own in _HISTOGRAMS:
            yield declaration.histograms([(labels, _merged(own, models))])


def _merged(own: Declaration, models: list[ModelFigures]) -> Histogram:
    return Histogram.merged(own.buckets, (one.histograms[own.name] for one in models))


def _listed(names: tuple[str, ...]) -> str:
    return ",".join(names[:_MAX_ADAPTERS])
