"""Runs a benchmark: queries the servers, warms them up, measures them in turns, shows and writes the figures."""

from __future__ import annotations

import dataclasses
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.document import MeasuredRun, document_of, write_document
from cluster.bench.http_sender import CallForm, HttpSender
from cluster.bench.load import LoadResult, offer_load
from cluster.bench.page.result_page import MeasuredServer, Result, write_page
from cluster.bench.pairs import Comparison, a_is_first, compare
from cluster.bench.prompts import PromptSource, Vocabulary, read_vocabulary
from cluster.bench.report import print_comparison, print_definitions, print_summary
from cluster.bench.server import ServedModel, Target, ask_vocabulary, find_model
from cluster.bench.summary import Summary, summarise
from cluster.client.client_credentials import Credentials
from cluster.commands.bench.bench_options import Benchmark
from cluster.errors import CannotMeasure, InvalidConfig

_LABELS: Final = ("A", "B")
_KEEP_ALIVE_S: Final = 3.0
"""Idle connections are closed before servers close them (uvicorn: 5 s): a request on such a connection would fail."""


@dataclass(frozen=True, slots=True)
class _Server:
    """A server that is measured."""

    label: str
    target: Target
    model: ServedModel


async def run_benchmark(benchmark: Benchmark, credentials: Credentials, token: str, console: Console) -> None:
    """Measure, print, and write the JSON file and the page.

    token: the bearer token, sent if the credentials have none
    Raises InvalidConfig before anything is sent, CannotMeasure if a server does not answer as it has to, and, after
    the figures, if a run had no complete answer.
    """
    targets = [_target(url, benchmark, credentials, token) for url in benchmark.base_urls]
    plans = [benchmark.plan(benchmark.first_seed + pair) for pair in range(_num_pairs(benchmark))]
    async with _session(credentials, benchmark) as session:
        servers = [
            _Server(label, target, await find_model(session, target, benchmark.options.model))
            for label, target in zip(_LABELS, targets, strict=False)
        ]
        for server in servers:
            _refuse_long(list(itertools.chain(*plans)), benchmark, server)
        vocabulary = await _vocabulary(session, benchmark, servers[0])
        measuring = _Measuring(session, benchmark, vocabulary, console)
        await measuring.warm_up(servers, plans[0])
        runs: list[MeasuredRun] = []
        for pair, plan in enumerate(plans):
            for server in servers if a_is_first(pair) else servers[::-1]:
                runs.append(await measuring.run(server, plan, pair))  # noqa: PERF401  # one after the other
    comparisons = _compared(runs, benchmark.metrics) if len(servers) == 2 else {}
    _print(console, benchmark, servers, runs, comparisons)
    if benchmark.options.json_file is not None:
        _write(benchmark, servers, runs, comparisons)
        console.print(f"written to {benchmark.options.json_file}", highlight=False, soft_wrap=True)
    if benchmark.options.html_file is not None:
        _write_page(benchmark, servers, runs, comparisons)
        console.print(f"written to {benchmark.options.html_file}", highlight=False, soft_wrap=True)
    for run in runs:
        if run.summary.num_completed == 0:
            kinds = ", ".join(run.summary.failures)
            raise CannotMeasure(f"{run.label}: none of {run.summary.num_failed} requests was answered whole: {kinds}")


class _Measuring:
    """Runs loads with the same options."""

    def __init__(
        self, session: aiohttp.ClientSession, benchmark: Benchmark, vocabulary: Vocabulary, console: Console
    ) -> None:
        self._session, self._benchmark, self._vocabulary = session, benchmark, vocabulary
        self._console = console

    async def warm_up(self, servers: Sequence[_Server], plan: Sequence[PlannedRequest]) -> None:
        """Send requests that do not count. Raises CannotMeasure if one of them fails."""
        few = [dataclasses.replace(request, arrival_s=0.0) for request in plan[: self._benchmark.options.num_warmups]]
        for server in servers if few else ():
            result = await self._offer(server, few, -1, f"{server.label} warm-up")
            failed = next((record for record in result.records if not record.is_complete), None)
            if failed is not None:
                shown = f"{failed.error}: {failed.detail}"
                raise CannotMeasure(f"a warm-up request to {server.target.base_url} failed: {shown}")

    async def run(self, server: _Server, plan: Sequence[PlannedRequest], pair: int) -> MeasuredRun:
        """Measure one run."""
        benchmark = self._benchmark
        num_pairs = _num_pairs(benchmark)
        title = f"{server.label} {pair + 1}/{num_pairs}" if num_pairs > 1 else "requests"
        result = await self._offer(server, plan, pair, title)
        seed = benchmark.first_seed + pair
        summary = summarise(result, benchmark.percents, benchmark.objectives_s, seed)
        return MeasuredRun(server.label, pair if num_pairs > 1 else None, seed, result, summary)

    async def _offer(self, server: _Server, plan: Sequence[PlannedRequest], pair: int, title: str) -> LoadResult:
        options, seed = self._benchmark.options, self._benchmark.first_seed + pair
        prompts = PromptSource(self._vocabulary, seed, self._benchmark.prefix)
        form = CallForm(server.model.id, "chat" if options.chat else "completions", self._benchmark.fields)
        sender = HttpSender(self._session, server.target, form, prompts, timeout_s=options.timeout_s)
        with _progress(self._console, title, len(plan)) as on_change:
            return await offer_load(
                plan, sender, max_concurrency=options.max_concurrency, seed=seed, on_change=on_change
            )


class _progress:  # noqa: N801  # reads as a function
    """Show a progress bar if the output is a terminal."""

    def __init__(self, console: Console, title: str, num_requests: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=4
        )
        self._task = self._progress.add_task(title, total=num_requests)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda num_sent, num_ended: self._progress.update(self._task, completed=num_ended)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _num_pairs(benchmark: Benchmark) -> int:
    return benchmark.options.num_pairs if len(benchmark.base_urls) == 2 else 1


def _target(base_url: str, benchmark: Benchmark, credentials: Credentials, token: str) -> Target:
    """Return the server with the headers of its calls. Raises InvalidConfig if the token would go in plain text."""
    parts = urlsplit(base_url)
    is_https = parts.scheme == "https"
    own = dataclasses.replace(credentials, token=credentials.token or token, tls=is_https, ca=None, certificate=None)
    headers = dict(own.metadata(f"{parts.hostname}:{parts.port or 0}"))
    return Target(base_url, {**headers, **benchmark.headers})


@asynccontextmanager
async def _session(credentials: Credentials, benchmark: Benchmark) -> AsyncIterator[aiohttp.ClientSession]:
    tls: ssl.SSLContext | bool = True
    if any(url.startswith("https:") for url in benchmark.base_urls):
        try:
            tls = ssl.create_default_context(cafile=credentials.ca)
            if credentials.certificate is not None:
                tls.load_cert_chain(credentials.certificate, credentials.key)
        except OSError as error:
            raise InvalidConfig("--tls-ca, --tls-cert", [f"they cannot be used: {error}"]) from error
    connector = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=_KEEP_ALIVE_S)
    no_timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_timeout, auto_decompress=False) as session:
        yield session


async def _vocabulary(session: aiohttp.ClientSession, benchmark: Benchmark, server: _Server) -> Vocabulary:
    options = benchmark.options
    if options.tokenizer is not None:
        vocabulary = read_vocabulary(options.tokenizer)
    else:
        vocabulary = await ask_vocabulary(session, server.target, server.model.id)
    if options.chat and not vocabulary.words:
        raise InvalidConfig("--chat", ["the tokenizer has no words of one token to write prompts with"])
    return vocabulary


def _refuse_long(plan: Sequence[PlannedRequest], benchmark: Benchmark, server: _Server) -> None:
    """Raise InvalidConfig if the model's context is too short for a planned request of any pair."""
    most = server.model.max_model_len
    prefix = benchmark.options.prefix_len
    lengths = [prefix + request.num_input_tokens + request.num_output_tokens for request in plan]
    num_long = 0 if most is None else sum(length > most for length in lengths)
    if num_long:
        shown = f"{num_long} of {len(plan)} requests are longer than {most} tokens, the context of {server.model.id}"
        raise InvalidConfig("lengths", [f"{shown}; the longest one has {max(lengths)}"])


def _compared(runs: Sequence[MeasuredRun], metrics: Sequence[str]) -> dict[str, Comparison]:
    sides = [
        [run.summary for run in sorted(runs, key=lambda run: run.pair or 0) if run.label == label] for label in _LABELS
    ]
    figures: dict[str, Callable[[Summary], float]] = {
        "output tok/s": lambda summary: summary.output_tokens_per_s,
        "req/s": lambda summary: summary.requests_per_s,
    }
    if all(summary.goodput is not None for side in sides for summary in side):
        figures["goodput, req/s"] = lambda summary: summary.goodput.per_s if summary.goodput else 0.0
    for name in metrics:
        if all(name in summary.metrics for side in sides for summary in side):
            figures |= _figures_of(name, list(sides[0][0].metrics[name].percentiles))
    return {
        title: compare([figure(one) for one in sides[0]], [figure(one) for one in sides[1]])
        for title, figure in figures.items()
    }


def _figures_of(metric: str, percents: Sequence[float]) -> dict[str, Callable[[Summary], float]]:
    def percentile(percent: float) -> Callable[[Summary], float]:
        return lambda summary: summary.metrics[metric].percentiles[percent].value * 1e3

    shown = {f"{metric} P{percent:g}, ms": percentile(percent) for percent in percents}
    return {f"{metric} mean, ms": lambda summary: summary.metrics[metric].mean.value * 1e3, **shown}


def _print(
    console: Console,
    benchmark: Benchmark,
    servers: Sequence[_Server],
    runs: Sequence[MeasuredRun],
    comparisons: dict[str, Comparison],
) -> None:
    for server in servers:
        console.print(f"{server.label}: {server.target.base_url}, model {server.model.id}", highlight=False)
    console.print(f"seed {benchmark.first_seed}: --seed repeats arrivals, lengths and prompts", highlight=False)
    for run in runs:
        title = f"{run.label}, pair {run.pair + 1}" if run.pair is not None else "Serving Benchmark Result"
        print_summary(console, run.summary, benchmark.metrics, title)
    if comparisons:
        print_comparison(console, comparisons, _num_pairs(benchmark))
    has_goodput = bool(benchmark.objectives_s)
    print_definitions(console, benchmark.metrics, has_goodput=has_goodput, has_pairs=bool(comparisons))


def _write(
    benchmark: Benchmark,
    servers: Sequence[_Server],
    runs: Sequence[MeasuredRun],
    comparisons: dict[str, Comparison],
) -> None:
    assert benchmark.options.json_file is not None
    described = [
        {
            "label": one.label,
            "url": one.target.base_url,
            "model": one.model.id,
            "max_model_len": one.model.max_model_len,
        }
        for one in servers
    ]
    document = document_of(_now(), _shown_options(benchmark), described, runs, comparisons)
    write_document(benchmark.options.json_file, document)


def _write_page(
    benchmark: Benchmark,
    servers: Sequence[_Server],
    runs: Sequence[MeasuredRun],
    comparisons: dict[str, Comparison],
) -> None:
    assert benchmark.options.html_file is not None
    described = [MeasuredServer(one.label, one.target.base_url, one.model.id) for one in servers]
    result = Result(_now(), _shown_options(benchmark), described, runs, comparisons, benchmark.metrics)
    write_page(benchmark.options.html_file, result)


def _shown_options(benchmark: Benchmark) -> dict[str, object]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(benchmark.options).items()
        if name != "headers"  # Headers may contain secrets, such as tokens.
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
