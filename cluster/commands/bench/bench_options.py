"""The options of `raypd bench`, which are checked before anything is sent."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from cluster.bench.arrivals import Lengths, PlannedRequest, arrival_times, plan_random, retimed
from cluster.bench.objectives import parse_objectives
from cluster.bench.pairs import MIN_PAIRS
from cluster.bench.prompts import SharedPrefix
from cluster.bench.server import base_url_of
from cluster.bench.summary import DEFINITIONS
from cluster.bench.traces import read_trace
from cluster.errors import InvalidConfig

_PartT = TypeVar("_PartT")
_OWN_FIELDS: Final = ("model", "prompt", "messages", "stream", "stream_options", "n", "best_of", "max_tokens")
"""Fields of a body that --extra-body cannot set, because the measurement depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options as they were given; see the command's help.

    urls: of one server, or of two that are measured in turns
    """

    urls: Sequence[str]
    num_pairs: int = MIN_PAIRS
    chat: bool = False
    model: str | None = None
    tokenizer: Path | None = None
    num_prompts: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    trace: Path | None = None
    trace_speed: float = 1.0
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float | None = None
    extra_body: str | None = None
    headers: Sequence[str] = ()
    slo: Sequence[str] = ()
    sends_slo: bool = False
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "50,90,99"
    timeout_s: float = 600.0
    seed: int | None = None
    json_file: Path | None = None
    html_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that can be run. base_urls: as in BenchOptions; fields: of every body; first_seed: of the first run

    Each further pair has the next seed, so that none of its prompts is in a server's cache.
    """

    options: BenchOptions
    base_urls: Sequence[str]
    objectives_s: Mapping[str, float]
    metrics: Sequence[str]
    percents: Sequence[float]
    fields: Mapping[str, object]
    headers: Mapping[str, str]
    first_seed: int

    @property
    def prefix(self) -> SharedPrefix:
        """The tokens with which prompts begin."""
        return SharedPrefix(self.options.prefix_len, self.options.num_prefixes)

    def plan(self, seed: int) -> list[PlannedRequest]:
        """Return the requests of a run. Raises InvalidConfig if the trace cannot be read."""
        options = self.options
        if options.trace is None:
            times = arrival_times(options.num_prompts, options.request_rate, options.burstiness, seed)
            return plan_random(times, Lengths(options.input_len, options.output_len, options.range_ratio), seed)
        plan = read_trace(options.trace, options.num_prompts, options.trace_speed, seed=seed)
        if math.isinf(options.request_rate):
            return plan
        return retimed(plan, arrival_times(len(plan), options.request_rate, options.burstiness, seed))


def check(options: BenchOptions) -> Benchmark:
    """Check the options together. Raises InvalidConfig with every mistake."""
    mistakes = _mistakes(options)

    def attempt(parse: Callable[[], _PartT]) -> _PartT | None:
        try:
            return parse()
        except InvalidConfig as error:
            mistakes.extend(str(error).splitlines())
            return None

    base_urls = attempt(lambda: [base_url_of(url) for url in options.urls])
    objectives_s = attempt(lambda: parse_objectives(options.slo))
    metrics = attempt(lambda: _metrics(options.percentile_metrics))
    percents = attempt(lambda: _percents(options.metric_percentiles))
    fields = attempt(lambda: _fields(options) | _aims(options, objectives_s or {}))
    headers = attempt(lambda: _headers(options.headers))
    if mistakes:
        raise InvalidConfig("raypd bench", mistakes)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    return Benchmark(
        options, base_urls or [], objectives_s or {}, metrics or [], percents or [], fields or {}, headers or {}, seed
    )


def _mistakes(options: BenchOptions) -> list[str]:
    is_burst = math.isinf(options.request_rate)
    is_trace = options.trace is not None
    found = {
        "--request-rate must be above 0": not options.request_rate > 0,
        "--burstiness must be above 0": not options.burstiness > 0,
        "--burstiness needs --request-rate: without it all requests are sent at once": options.burstiness != 1
        and is_burst,
        "--range-ratio must be from 0 to below 1": not 0 <= options.range_ratio < 1,
        "--range-ratio has no effect with --trace, which has its own lengths": is_trace and options.range_ratio != 0,
        "--trace-speed must be above 0": not 0 < options.trace_speed < math.inf,
        "--trace-speed has no effect without --trace, or with --request-rate": options.trace_speed != 1
        and (not is_trace or not is_burst),
        "--num-prefixes has no effect without --prefix-len": options.num_prefixes != 1 and not options.prefix_len,
        f"--pairs must be at least {MIN_PAIRS}, or the ratios have no 90 % interval": len(options.urls) == 2
        and options.num_pairs < MIN_PAIRS,
        f"--json {options.json_file} cannot be written": not _is_writable(options.json_file),
        f"--html {options.html_file} cannot be written": not _is_writable(options.html_file),
    }
    return [mistake for mistake, is_made in found.items() if is_made]


def _is_writable(path: Path | None) -> bool:
    if path is None:
        return True
    if path.exists():
        return path.is_file() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)


def _metrics(text: str) -> list[str]:
    names = ["e2el" if name == "e2e" else name for name in _parts(text)]
    unknown = [name for name in names if name not in DEFINITIONS]
    if unknown or not names:
        allowed = ", ".join(DEFINITIONS)
        raise InvalidConfig("--percentile-metrics", [f"{name!r} is not one of {allowed}" for name in unknown or [text]])
    return names


def _percents(text: str) -> list[float]:
    try:
        percents = [float(part) for part in _parts(text)]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent < 100 for percent in percents):
        raise InvalidConfig("--metric-percentiles", [f"{text!r} is not a list of numbers between 0 and 100"])
    return percents


def _fields(options: BenchOptions) -> dict[str, object]:
    fields: dict[str, object] = {"ignore_eos": True} if options.ignore_eos else {}
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    if options.extra_body is None:
        return fields
    try:
        further = json.loads(options.extra_body)
    except ValueError as error:
        raise InvalidConfig("--extra-body", [f"it is not JSON: {error}"]) from error
    if not isinstance(further, dict):
        raise InvalidConfig("--extra-body", ["it is not a JSON object"])
    own = [name for name in further if name in _OWN_FIELDS]
    if own:
        raise InvalidConfig("--extra-body", [f"{name} cannot be set: the measurement depends on it" for name in own])
    return fields | further


def _aims(options: BenchOptions, objectives_s: Mapping[str, float]) -> dict[str, object]:
    """Return the field with the aims of every request, as raypd's API has it: in milliseconds."""
    if not options.sends_slo:
        return {}
    # raypd compares the mean time between a request's tokens with its ITL aim.
    limits = {"ttft_ms": objectives_s.get("ttft"), "itl_ms": objectives_s.get("tpot", objectives_s.get("itl"))}
    aims = {name: limit_s * 1000 for name, limit_s in limits.items() if limit_s is not None}
    if not aims:
        raise InvalidConfig("--send-slo", ["it needs --slo with ttft, tpot or itl, which are sent as aims"])
    return {"slo": aims}


def _headers(texts: Iterable[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise InvalidConfig("--header", [f"{text!r} is not of the form NAME=VALUE"])
        headers[name.strip().lower()] = value.strip()
    return headers


def _parts(text: str) -> list[str]:
    return [part.strip().lower() for part in text.split(",") if part.strip()]
