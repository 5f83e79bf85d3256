"""Is a cluster whose engines have roles ever worse than one without, when the ways of requests are chosen by cost?

Three clusters of two engines, one core each, are up side by side; one of them is loaded at a time, in turns, with the
same requests:

- cost: one prefill and one decode engine, routing.mode cost, and the aims as settings
- disaggregate: the same engines, every request prefilled on one and decoded on the other
- aggregate: two engines without roles, each request on one of them, spread with regard to cached prefixes

A cell is a shape of requests. At first the rate is found at which the better of `disaggregate` and `aggregate` just
meets the aims: 5 times the time to the first token and 3 times the time between tokens of an idle cluster, the latter
held against a request's mean (its time per output token, as goodput is defined by vLLM's and DistServe's benchmarks):
one longest gap of a hundred tells of this machine's other processes, not of the way that was chosen. A rate that was
found must be good a second time, or it is lowered. Then each repeat
measures the requests per second that meet both aims, at this rate, in all three clusters; a burst measures output
tokens per second. A second round throttles the links of KV.

    python -m benchmarks.never_worse --results never_worse.jsonl
    python -m benchmarks.never_worse --results never_worse.jsonl --only 1800x32 --only "64x128 random rate"

What is in the file of results is not measured again, so the whole, which takes hours on a machine that does nothing
else, can be measured in parts. Runs of another model need a file of their own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table

from actors.costs.cost_keeper import CACHE_VARIABLE
from benchmarks.server_runs import RAYPD, bench, confirmed_rate, highest_good_rate, percentile_s, serving
from cluster.bench.pairs import MIN_PAIRS, compare

ARMS: Final = ("cost", "disaggregate", "aggregate")
_SHAPES: Final = ((64, 128), (512, 64), (1800, 32), (1800, 128))
_PREFIX_SHARE: Final = 0.75
"""The part of a prompt that is one of the shared prefixes."""
_NUM_PREFIXES: Final = 4
_IDLE, _WARM_UP, _FIRST_PROBE = 900, 901, 902
"""Numbers of a cell's runs that are no repeats."""
_TTFT_AIM, _ITL_AIM = 5.0, 3.0
_RATE_LASTS_S: Final = 8.0
"""The requests of a rate come within this time, or longer. Those of a high rate would be a burst otherwise."""
_LEAST_RATIO, _LEAST_MEAN, _MOST_ITL = 0.95, 0.98, 0.7
_LONG_PROMPT: Final = 1024
"""The times between tokens are compared for prompts of at least this many tokens."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A shape of requests and how they come.

    load: `rate` for random arrivals at the calibrated rate, `burst` for all at once
    """

    input_len: int
    output_len: int
    is_shared: bool
    load: str
    is_throttled: bool

    @property
    def name(self) -> str:
        """The cell's name in results and options."""
        return " ".join([self.prompts, self.load, *(["throttled"] if self.is_throttled else [])])

    @property
    def prompts(self) -> str:
        """The name of the requests' shape."""
        return f"{self.input_len}x{self.output_len} {'shared' if self.is_shared else 'random'}"

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens of a request's own part of the prompt and of its output."""
        own = self.input_len - self.prefix_len
        return own, self.output_len

    @property
    def prefix_len(self) -> int:
        """The tokens of a shared prefix."""
        return int(self.input_len * _PREFIX_SHARE) if self.is_shared else 0

    @property
    def options(self) -> list[str]:
        """The options of `raypd bench` that make the prompts."""
        if not self.is_shared:
            return []
        return ["--prefix-len", str(self.prefix_len), "--num-prefixes", str(_NUM_PREFIXES)]

    def seed(self, number: int) -> int:
        """Return the seed of one of the cell's runs: no cluster gets the same prompts twice, and has them cached."""
        return 1000 * all_cells().index(self) + number


@dataclass(frozen=True, slots=True)
class Result:
    """One run. figure: good requests per second, or output tokens per second of a burst"""

    cell: str
    repeat: int
    arm: str
    figure: float
    itl_p99_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The load of a shape of prompts. Rates are in requests per second, aims in seconds."""

    prompts: str
    rate: float
    ttft_aim_s: float
    itl_aim_s: float


def all_cells() -> list[Cell]:
    """Return every cell: rates and bursts, and the rates once more with throttled links."""
    kinds = (("rate", False), ("burst", False), ("rate", True))
    return [
        Cell(*shape, is_shared=is_shared, load=load, is_throttled=is_throttled)
        for load, is_throttled in kinds
        for shape, is_shared in itertools.product(_SHAPES, (False, True))
    ]


def chosen_cells(parts: Iterable[str]) -> list[Cell]:
    """Return the cells whose names contain one of these parts. Raises BadParameter if no name contains a part."""
    cells = all_cells()
    for part in parts:
        if not any(part in cell.name for cell in cells):
            raise typer.BadParameter(f"no cell has {part!r} in its name: {', '.join(cell.name for cell in cells)}")
    return [cell for cell in cells if any(part in cell.name for part in parts)]


def run(
    results: Annotated[Path, typer.Option(help="File of results, one JSON object a line; it is continued.")],
    only: Annotated[list[str] | None, typer.Option(help="Measure only cells whose names contain one of these.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; default: the demo model.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each cell; at least 5 for intervals.")] = MIN_PAIRS,
    requests: Annotated[int, typer.Option(min=4, help="Requests of a burst, and the fewest of a rate.")] = 32,
    throttled_mib_per_s: Annotated[float, typer.Option(help="Bandwidth of a throttled link: a tenth of yours.")] = 100,
) -> None:
    """Measure the cells that the file of results lacks, and print the table."""
    console, kept = Console(width=120), Kept(results)
    for is_throttled in (False, True):
        cells = [cell for cell in chosen_cells(only or [""]) if cell.is_throttled == is_throttled]
        missing = sorted((cell for cell in cells if kept.lacks(cell, repeats)), key=lambda cell: cell.prompts)
        if not missing:
            continue
        with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
            # Step costs that other programs have saved, on a loaded machine perhaps, are no part of the measurement.
            os.environ[CACHE_VARIABLE] = directory
            clusters = Clusters(Path(directory), model, throttled_mib_per_s if is_throttled else None)
            urls = {arm: stack.enter_context(serving(partial(clusters.command, arm, None))).url for arm in ARMS[1:]}
            for _, group in itertools.groupby(missing, key=lambda cell: cell.prompts):
                alike = list(group)
                known = kept.calibrations.get(alike[0].prompts)
                aims = known or _aims(alike[0], urls["aggregate"])
                with serving(partial(clusters.command, "cost", aims)) as cost:
                    # All three are up when the rate is looked for, as an idle cluster takes processor time, too.
                    load = known or _calibrate(alike[0], aims, urls, kept, console, requests)
                    if load.rate == 0.0:
                        console.print(f"{load}: left out, since neither arm meets the aims at any rate", soft_wrap=True)
                        continue
                    # The other two have served the requests of the calibration by now.
                    warm_up = replace(alike[0], load="rate")
                    _offer(warm_up, cost.url, load, number=_WARM_UP, num_requests=requests)
                    for cell in alike:
                        _measure(cell, load, {"cost": cost.url, **urls}, kept, console, repeats, requests)
    console.print(table_of(kept.results))


@dataclass(frozen=True, slots=True)
class Clusters:
    """The clusters' settings. directory: for their files; mib_per_s: bandwidth of the links of KV; None: no limit"""

    directory: Path
    model: Path | None
    mib_per_s: float | None

    def command(self, arm: str, load: Calibration | None, port: int) -> list[str]:
        """Write the settings of a cluster, and return its command. load: has the cluster's aims"""
        group, none = {"count": 1, "num_cpus": 1}, {"count": 0}
        has_roles = arm != "aggregate"
        settings: dict[str, object] = {
            "cache": {"kv_cache_memory_gib": 0.5},
            # Engines hold cores: those of the cluster that starts first would have them, and the others none.
            "parallel": {"cpu_binding": "none"},
            "prefill": group if has_roles else none,
            "decode": group if has_roles else none,
            "both": none if has_roles else {"count": 2, "num_cpus": 1},
            "routing": {"mode": arm},
            "ingress": {"port": 0, "http": {"port": port}},
        }
        if self.model is not None:
            settings["model"] = {"model": str(self.model)}
        if self.mib_per_s is not None:
            settings["kv_transfer"] = {"max_send_mib_per_s": self.mib_per_s}
        if load is not None:
            settings["slo"] = {"ttft_ms": load.ttft_aim_s * 1e3, "itl_ms": load.itl_aim_s * 1e3}
        file = self.directory / f"{arm}.yaml"
        file.write_text(yaml.safe_dump(settings))
        return [RAYPD, "serve", "--config", str(file)]


class Kept:
    """The file of results and calibrations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: list[Result] = []
        self.calibrations: dict[str, Calibration] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = json.loads(line)
            if "rate" in fields:
                self.calibrations[fields["prompts"]] = Calibration(**fields)
            else:
                self.results.append(Result(**fields))

    def add(self, entry: Result | Calibration) -> None:
        """Keep an entry, and write it down at once."""
        if isinstance(entry, Result):
            self.results.append(entry)
        else:
            self.calibrations[entry.prompts] = entry
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def has(self, cell: Cell, repeat: int, arm: str) -> bool:
        """Whether a run was measured."""
        return any((one.cell, one.repeat, one.arm) == (cell.name, repeat, arm) for one in self.results)

    def lacks(self, cell: Cell, repeats: int) -> bool:
        """Whether any run of a cell is missing."""
        return not all(self.has(cell, repeat, arm) for repeat in range(repeats) for arm in ARMS)


def _measure(
    cell: Cell,
    load: Calibration,
    urls: Mapping[str, str],
    kept: Kept,
    console: Console,
    repeats: int,
    num_requests: int,
) -> None:
    for repeat in range(repeats):
        first = repeat % len(ARMS)
        for arm in (*ARMS[first:], *ARMS[:first]):
            if kept.has(cell, repeat, arm):
                continue
            found = _offer(cell, urls[arm], load, number=repeat, num_requests=num_requests)
            figure = float(found["goodput"]["per_s"] if cell.load == "rate" else found["output_throughput"])
            kept.add(Result(cell.name, repeat, arm, figure, percentile_s(found, "itl", 99)))
            console.print(f"{cell.name}, repeat {repeat}, {arm}: {figure:.2f}", soft_wrap=True)


def _offer(cell: Cell, url: str, load: Calibration, *, number: int, num_requests: int) -> dict[str, Any]:
    if cell.load == "rate":
        num_requests = max(num_requests, round(load.rate * _RATE_LASTS_S))
    aims = f"ttft={load.ttft_aim_s * 1e3:.3f}ms,tpot={load.itl_aim_s * 1e3:.3f}ms"
    rate = [] if cell.load == "burst" else ["--request-rate", str(load.rate), "--slo", aims]
    return bench(url, cell.seed(number), num_requests, *cell.lengths, *cell.options, *rate)


def _aims(cell: Cell, url: str) -> Calibration:
    """Return the aims by what an idle cluster takes, with no rate yet."""
    idle = bench(url, cell.seed(_IDLE), 6, *cell.lengths, *cell.options, "--max-concurrency", "1")
    return Calibration(cell.prompts, 0.0, _TTFT_AIM * percentile_s(idle, "ttft"), _ITL_AIM * percentile_s(idle, "itl"))


def _calibrate(
    cell: Cell, aims: Calibration, urls: Mapping[str, str], kept: Kept, console: Console, num_requests: int
) -> Calibration:
    """Return the aims, and the rate at which the better of the two arms just meets them; urls: by arm"""
    probes = itertools.count(_FIRST_PROBE)

    def share_at(url: str, rate: float) -> float:
        probed, number = replace(cell, load="rate"), next(probes)
        found = _offer(probed, url, replace(aims, rate=rate), number=number, num_requests=num_requests)
        return float(found["goodput"]["share"])

    rates = {arm: highest_good_rate(partial(share_at, url)) for arm, url in urls.items()}
    better = max(rates, key=rates.__getitem__)
    found = replace(aims, rate=confirmed_rate(partial(share_at, urls[better]), rates[better]))
    kept.add(found)
    console.print(f"{found} (rates: {rates})", soft_wrap=True)
    return found


def table_of(results: Iterable[Result]) -> Table:
    """Return a row for each cell, with the verdict on each, and the geometric mean of the rates' ratios last."""
    table = Table(title="good requests/s at a rate, output tokens/s of a burst: medians, and cost / the better arm")
    for column in ("cell", *ARMS, "ratio (90 % interval)", "ITL p99 / aggregate", "met"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    by_cell: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        by_cell.setdefault(result.cell, {arm: [] for arm in ARMS})[result.arm].append(result)
    rates: list[float] = []
    for cell, arms in by_cell.items():
        figures = {arm: [one.figure for one in sorted(arms[arm], key=lambda one: one.repeat)] for arm in ARMS}
        if len({len(each) for each in figures.values()}) != 1 or len(figures["cost"]) < MIN_PAIRS:
            table.add_row(cell, *(f"{len(figures[arm])} runs" for arm in ARMS), "", "", "")
            continue
        verdict = judge(figures, {arm: [one.itl_p99_s for one in arms[arm]] for arm in ARMS})
        if " rate" in cell:
            rates.append(verdict.ratio)
        needs_itl = " rate" in cell and int(cell.split("x", maxsplit=1)[0]) >= _LONG_PROMPT
        is_met = verdict.high >= _LEAST_RATIO and (not needs_itl or verdict.itl_ratio <= _MOST_ITL)
        table.add_row(
            cell,
            *(f"{statistics.median(figures[arm]):.2f}" for arm in ARMS),
            f"{verdict.ratio:.2f} ({verdict.low:.2f} to {verdict.high:.2f})",
            f"{verdict.itl_ratio:.2f}",
            "yes" if is_met else "no",
        )
    if rates:
        mean = geometric_mean(rates)
        table.add_row("geometric mean of rates", "", "", "", f"{mean:.2f}", "", "yes" if mean >= _LEAST_MEAN else "no")
    return table


@dataclass(frozen=True, slots=True)
class Verdict:
    """How `cost` compares with the better arm in one cell. low, high: the 90 % interval of the median ratio

    itl_ratio: the 99th percentile of the times between tokens, over the aggregated arm's
    """

    ratio: float
    low: float
    high: float
    itl_ratio: float


def judge(figures: Mapping[str, Sequence[float]], itl_p99_s: Mapping[str, Sequence[float]]) -> Verdict:
    """Compare an arm's figures by repeats; the better arm is the one with the higher median."""
    better = max((arm for arm in ARMS if arm != "cost"), key=lambda arm: statistics.median(figures[arm]))
    compared = compare(figures[better], figures["cost"])
    itl_s = {arm: statistics.median(values) for arm, values in itl_p99_s.items()}
    itl_ratio = itl_s["cost"] / itl_s["aggregate"] if itl_s["aggregate"] else math.nan
    return Verdict(compared.ratio, compared.low, compared.high, itl_ratio)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean; NaN if a ratio is missing, 0 if one is 0."""
    if any(math.isnan(ratio) for ratio in ratios):
        return math.nan
    return 0.0 if 0.0 in ratios else math.exp(statistics.fmean(map(math.log, ratios)))


if __name__ == "__main__":
    typer.run(run)
