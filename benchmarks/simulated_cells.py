"""Is routing by cost ever worse than the better of two fixed ways, on more engines than this machine has cores?

This is benchmarks/never_worse.py in virtual time: the product's scheduler, router and handoffs on simulated engines,
whose steps take what tables of operators say that were measured on a GPU. Half of the engines prefer prefill and half
decode; in the arm `aggregate` none has a role. The rate is found on 8 engines at which the better of `disaggregate` and
`aggregate` just meets the aims, 5 times the time to the first token and 3 times the time between tokens of an idle
cluster; a cluster of any size gets as many requests for each of its engines. Each figure is the median of several
seeds: good requests per second. A ratio is the median of the seeds' ratios with its 90 % interval, since at such a rate
an arm's own figures differ by a tenth from seed to seed; it is met if the interval reaches the target. Two ingresses
share the load of one.

    python -m benchmarks.simulated_cells --ops tests/data/llmservingsim/ops/GPU/tp1 \
        --shape tests/data/llmservingsim/runs/GPU/shape.json
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from actors.config import SchedulerConfig
from actors.core.requests.slo import Slo
from actors.costs.step_cost_model import StepCostModel
from benchmarks.server_runs import highest_good_rate
from cluster.bench.pairs import MIN_PAIRS, Comparison, compare
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.engines.fitted_costs import fit_step_costs
from cluster.simulation.simulator import simulate
from cluster.simulation.timing.model_shape import ModelShape, read_model_shape
from cluster.simulation.timing.op_tables import OpTables, read_op_tables
from cluster.simulation.timing.rank_exchange import RankLayout
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest

_SHAPES: Final = ((64, 128), (512, 64), (1800, 32), (1800, 128))
_PREFIX_SHARE: Final = 0.75
_NUM_PREFIXES: Final = 4
_TTFT_AIM, _ITL_AIM = 5.0, 3.0
_LINK_BYTES_PER_S: Final = 12.5e9
_THROTTLED: Final = 0.1
_LATENCY_S: Final = 1e-4
_SMALL_BLOCK: Final = 16
_CALIBRATED_ENGINES: Final = 8
_MIN_RATIO, _MIN_OF_TWO = 0.95, 0.98
_NO_LIMITS: Final = IngressConfig(max_requests_in_flight=1 << 30, max_waiting_tokens=1 << 60)


@dataclass(frozen=True, slots=True)
class Cell:
    """A shape of requests and the links of KV. is_shared: prompts begin with one of a few prefixes"""

    input_len: int
    output_len: int
    is_shared: bool
    is_throttled: bool

    @property
    def name(self) -> str:
        """The cell's name in the table."""
        words = [f"{self.input_len}x{self.output_len}", "shared" if self.is_shared else "random"]
        return " ".join([*words, *(["throttled"] if self.is_throttled else [])])

    @property
    def num_shared_blocks(self) -> int:
        """The blocks of a shared prefix: whole ones, as only these are found in caches."""
        return int(self.input_len * _PREFIX_SHARE) // HASHED_TOKENS if self.is_shared else 0


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine's GPU and model. costs: what its engines report to routers"""

    tables: OpTables
    shape: ModelShape
    scheduler: SchedulerConfig
    costs: StepCostModel


@dataclass(frozen=True, slots=True)
class Aims:
    """The load of a cell: the rate of one engine in requests per second, and the aims."""

    rate: float
    slo: Slo


def main(
    ops: Annotated[Path, typer.Option(help="Directory of tables of operators.")],
    shape: Annotated[Path, typer.Option(help="The model's shape, JSON.")],
    engines: Annotated[list[int], typer.Option(help="Engines of a cluster; several clusters.")] = [8, 64],  # noqa: B006
    per_engine: Annotated[int, typer.Option(min=4, help="Requests of a run, for each engine.")] = 40,
    seeds: Annotated[int, typer.Option(min=MIN_PAIRS, help="Runs of each arm.")] = 7,
    only: Annotated[list[str] | None, typer.Option(help="Only cells whose names contain one of these.")] = None,
) -> None:
    """Print a row for each cell and size of cluster; end with an error if a ratio is below its limit."""
    machine = read_machine(ops, shape)
    console = Console(width=140)
    table = Table(title="good requests/s, medians; cost / the better arm; two ingresses / one")
    for column in ("cell", "engines", "rate", "disaggregate", "aggregate", "cost", "ratio", "two", "ratio of two"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    worst = worst_of_two = 1.0
    for cell in all_cells():
        if only and not any(part in cell.name for part in only):
            continue
        aims = calibrate(machine, cell, per_engine)
        if not aims.rate:
            table.add_row(cell.name, "", "neither arm meets the aims at any rate")
            continue
        for num_engines in engines:
            found = measure(machine, cell, aims, num_engines, per_engine, seeds)
            medians = {arm: statistics.median(each) for arm, each in found.items()}
            better = max(("disaggregate", "aggregate"), key=medians.__getitem__)
            ratio, of_two = compare(found[better], found["cost"]), compare(found["cost"], found["two"])
            worst, worst_of_two = min(worst, ratio.high), min(worst_of_two, of_two.high)
            arms = (f"{medians[arm]:.1f}" for arm in ("disaggregate", "aggregate", "cost"))
            table.add_row(
                cell.name,
                str(num_engines),
                f"{aims.rate * num_engines:.1f}",
                *arms,
                _text(ratio),
                f"{medians['two']:.1f}",
                _text(of_two),
            )
            console.print(f"{cell.name}, {num_engines} engines: {_text(ratio)}, {_text(of_two)}", soft_wrap=True)
    console.print(table)
    if worst < _MIN_RATIO or worst_of_two < _MIN_OF_TWO:
        console.print(f"the lowest ends of intervals are {worst:.3f} and {worst_of_two:.3f}")
        raise typer.Exit(1)


def _text(compared: Comparison) -> str:
    return f"{compared.ratio:.3f} ({compared.low:.3f} to {compared.high:.3f})"


def all_cells() -> list[Cell]:
    """Return every cell. Prefixes that are shorter than a block are none."""
    cells = [
        Cell(*shape, shared, throttled) for throttled in (False, True) for shape in _SHAPES for shared in (False, True)
    ]
    return [cell for cell in cells if cell.num_shared_blocks or not cell.is_shared]


def read_machine(ops: Path, shape: Path) -> Machine:
    """Read the tables of operators and the model's shape. Raises InvalidConfig."""
    model, scheduler = read_model_shape(shape), SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048)
    tables = read_op_tables(ops, model, RankLayout())
    return Machine(tables, model, scheduler, fit_step_costs(tables, scheduler))


def calibrate(machine: Machine, cell: Cell, per_engine: int) -> Aims:
    """Return the aims, and the rate of one engine at which the better of the two fixed ways just meets them."""
    idle = simulate(cluster_of(machine, cell, "aggregate", 1, Slo()), offered(cell, 6, 0.05, 1), seed=1).requests
    ttft_s = statistics.median(one.ttft_s for one in idle)
    itl_s = statistics.median(one.itl_p50_s for one in idle)
    slo = Slo(ttft_s=_TTFT_AIM * ttft_s, itl_s=_ITL_AIM * itl_s)

    def share_at(arm: str, rate: float) -> float:
        spec = cluster_of(machine, cell, arm, _CALIBRATED_ENGINES, slo)
        requests = offered(cell, per_engine * _CALIBRATED_ENGINES, rate * _CALIBRATED_ENGINES, 2)
        return simulate(spec, requests, seed=2).good_share(slo)

    rates = [highest_good_rate(partial(share_at, arm), first=4.0) for arm in ("disaggregate", "aggregate")]
    return Aims(max(rates), slo)


def measure(
    machine: Machine, cell: Cell, aims: Aims, num_engines: int, per_engine: int, num_seeds: int
) -> dict[str, list[float]]:
    """Return the good requests per second of each arm's runs, by its name; `two` is `cost` with two ingresses."""
    found: dict[str, list[float]] = {}
    for seed in range(num_seeds):
        for arm in ("disaggregate", "aggregate", "cost", "two"):
            spec = cluster_of(machine, cell, arm, num_engines, aims.slo)
            requests = offered(cell, per_engine * num_engines, aims.rate * num_engines, 1000 + seed)
            found.setdefault(arm, []).append(simulate(spec, requests, seed=seed).goodput(aims.slo))
            # A simulated cluster is in cycles, and one of 64 engines takes 400 MB.
            gc.collect()
    return found


def cluster_of(machine: Machine, cell: Cell, arm: str, num_engines: int, slo: Slo) -> ClusterSpec:
    """Return a cluster of one arm."""
    roles = [EngineRole.BOTH] * num_engines
    if arm != "aggregate":
        roles = [EngineRole.PREFILL] * (num_engines // 2) + [EngineRole.DECODE] * (num_engines - num_engines // 2)
    block_size = HASHED_TOKENS if cell.is_shared else _SMALL_BLOCK
    engines = [
        EngineSpec(
            f"{role}-{number}",
            role,
            machine.tables,
            machine.shape.num_kv_tokens // block_size,
            machine.scheduler,
            block_size,
            step_costs=machine.costs,
            itl_s=slo.itl_s,
            ttft_s=slo.ttft_s,
        )
        for number, role in enumerate(roles)
    ]
    bytes_per_s = _LINK_BYTES_PER_S * (_THROTTLED if cell.is_throttled else 1.0)
    mode = RoutingMode.COST if arm == "two" else RoutingMode(arm)
    links, kv_bytes = LinkSpec(bytes_per_s, _LATENCY_S), machine.shape.kv_bytes_per_token()
    spec = ClusterSpec(tuple(engines), links, kv_bytes, mode, slo, ingress=_NO_LIMITS)
    return replace(spec, num_ingresses=2 if arm == "two" else 1)


def offered(cell: Cell, num_requests: int, per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests with random arrivals."""
    draw, arrival_s = random.Random(seed), 0.0
    num_blocks = -(-cell.input_len // HASHED_TOKENS)
    for number in range(num_requests):
        arrival_s += draw.expovariate(per_s)
        hashes: tuple[int, ...] = ()
        if cell.is_shared:
            prefix = draw.randrange(_NUM_PREFIXES)
            shared = [prefix * num_blocks + block for block in range(cell.num_shared_blocks)]
            own = (number + _NUM_PREFIXES) * num_blocks
            hashes = (*shared, *(own + block for block in range(len(shared), num_blocks)))
        yield WorkloadRequest(str(number), arrival_s, cell.input_len, cell.output_len, hashes)


if __name__ == "__main__":
    typer.run(main)
