"""Does the planner serve a day with fewer engines than a fixed fleet, and better than a threshold autoscaler?

A day in virtual time: a quiet night, a morning ramp, a burst before noon, and in the afternoon a shift from long
prompts with short answers to short prompts with long answers. It has as many hours as --hours says: 2 hours mean that
everything changes twelve times as fast as in a day of 24.

Arms, all on the same requests and the same engines, whose steps take what tables of operators say that were measured on
a GPU:

    planner     the product's planner in the mode `act`, with its default settings
    fixed       the best fixed fleet in hindsight: the fewest engines, and of these the roles that serve best, with
                which enough requests of the day meet the aims; found by trying all of them
    autoscaler  Ray Serve's rule, with its default target of 2 requests under way, and with the target that is best in
                hindsight: the fewest engine-hours with which enough requests meet the aims

A start of an engine takes 60 s, in which it takes its GPU. "taken back" counts changes of the number of engines, or of
those of one role, that were undone within five minutes: flapping.

    python -m benchmarks.day_of_load --ops tests/data/llmservingsim/ops/RTXPRO6000/tp1 \
        --shape tests/data/llmservingsim/runs/RTXPRO6000/shape.json
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from actors.core.requests.slo import Slo
from benchmarks.simulated_cells import Machine, read_machine
from benchmarks.threshold_autoscaler import AutoscalerSettings, ThresholdAutoscaler
from cluster.access.aims import Aims
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts
from cluster.planning.fleet_estimate import FleetEstimator
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig
from cluster.settings.planning import PlannerConfig
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.fleet.orders import FleetControl
from cluster.simulation.fleet.simulated_planner import SimulatedPlanner
from cluster.simulation.fleet_estimator import SimulationEstimator
from cluster.simulation.simulation_result import FleetPoint, SimulationResult
from cluster.simulation.simulator import Simulation, simulate
from cluster.simulation.workloads.drawn_requests import LengthDistribution
from cluster.simulation.workloads.workload_request import HASHED_TOKENS, WorkloadRequest

_PROMPTS: Final = LengthDistribution(6000.0, 0.8, 200, 24_000), LengthDistribution(150.0, 0.8, 4, 1000)
"""Lengths of prompts and answers of requests with long prompts."""
_ANSWERS: Final = LengthDistribution(500.0, 0.8, 20, 4000), LengthDistribution(600.0, 0.8, 20, 4000)
"""The same of requests with long answers."""
_SLO: Final = Slo(ttft_s=5.0, itl_s=0.1)
_LINKS: Final = LinkSpec(bytes_per_s=12.5e9, latency_s=1e-4)
_NO_LIMITS: Final = IngressConfig(max_requests_in_flight=1 << 30, max_waiting_tokens=1 << 60)
_ATTAINMENT: Final = 0.9
_MOST_ENGINES: Final = 16
PLANNER: Final = PlannerConfig(max_engines=_MOST_ENGINES)
_SOON_S: Final = 300.0
_TARGETS: Final = (2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the day. Between two marks the load changes evenly.

    at:      part of the day that is over
    rate:    requests per second, as a part of the rate at noon
    answers: part of the requests that have long answers
    part:    name of the part of the day that begins here
    """

    at: float
    rate: float
    answers: float
    part: str


DAY: Final = (
    Mark(0.00, 0.15, 0.0, "night"),
    Mark(0.12, 0.15, 0.0, "ramp"),
    Mark(0.30, 1.00, 0.0, "noon"),
    Mark(0.42, 1.00, 0.0, "burst"),
    Mark(0.425, 1.8, 0.0, "burst"),
    Mark(0.445, 1.8, 0.0, "burst"),
    Mark(0.45, 1.00, 0.0, "noon"),
    Mark(0.58, 1.00, 0.0, "shift"),
    Mark(0.62, 1.00, 1.0, "answers"),
    Mark(0.82, 1.00, 1.0, "evening"),
    Mark(0.92, 0.15, 1.0, "evening"),
    Mark(1.00, 0.15, 1.0, "evening"),
)


@dataclass(frozen=True, slots=True)
class Day:
    """A day's load. noon_per_s: requests per second at noon"""

    hours: float
    noon_per_s: float
    seed: int

    def requests(self) -> Iterator[WorkloadRequest]:
        """Yield the requests: a Poisson process whose rate and lengths follow the marks."""
        draw = np.random.default_rng(self.seed)
        duration_s, most_per_s = 3600 * self.hours, self.noon_per_s * max(mark.rate for mark in DAY)
        num_drawn = draw.poisson(duration_s * most_per_s)
        arrivals_s = np.sort(draw.uniform(0, duration_s, num_drawn))
        at, rates, answers = ([getattr(mark, name) for mark in DAY] for name in ("at", "rate", "answers"))
        rate = self.noon_per_s * np.interp(arrivals_s / duration_s, at, rates)
        arrivals_s = arrivals_s[draw.uniform(0, most_per_s, num_drawn) < rate]
        num = len(arrivals_s)
        has_long_answer = draw.uniform(0, 1, num) < np.interp(arrivals_s / duration_s, at, answers)
        drawn = [[lengths.draw(draw, num) for lengths in kind] for kind in (_PROMPTS, _ANSWERS)]
        prompts, outputs = (np.where(has_long_answer, *pair).tolist() for pair in zip(drawn[1], drawn[0], strict=True))
        for number, arrival_s in enumerate(arrivals_s.tolist()):
            yield WorkloadRequest(str(number), arrival_s, prompts[number], outputs[number])

    def part_at(self, time_s: float) -> str:
        """Return the name of the part of the day."""
        at = time_s / (3600 * self.hours)
        return next(mark.part for mark in reversed(DAY) if mark.at <= at)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A day as one arm has served it. fleet: the engines, in words; "" if they changed"""

    name: str
    fleet: str
    result: SimulationResult

    @property
    def attainment(self) -> float:
        """The part of the requests that met the aims."""
        return self.result.good_share(_SLO)

    @property
    def engine_hours(self) -> float:
        """The hours for which engines took their GPUs, summed."""
        return self.result.engine_seconds / 3600


def main(
    ops: Annotated[Path, typer.Option(help="Directory of tables of operators.")],
    shape: Annotated[Path, typer.Option(help="The model's shape, JSON.")],
    hours: Annotated[float, typer.Option(help="Length of the day, in hours.")] = 2.0,
    noon_per_s: Annotated[float, typer.Option(help="Requests per second at noon.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Draws the requests.")] = 1,
    arms: Annotated[str, typer.Option(help="Any of planner, fixed and autoscaler.")] = "planner,fixed,autoscaler",
    records: Annotated[Path | None, typer.Option(help="File for the planner's decisions, one JSON a line.")] = None,
) -> None:
    """Print a row for each arm."""
    console, machine, day = Console(width=160), read_machine(ops, shape), Day(hours, noon_per_s, seed)
    served: list[Served] = []
    for arm in arms.split(","):
        if arm == "planner":
            found, planner = planned(machine, day)
            served.append(found)
            if records is not None:
                records.write_bytes(b"\n".join(record.to_json() for record in planner.records))
        else:
            served += best_fixed(machine, day) if arm == "fixed" else autoscaled(machine, day)
        console.print(f"{arm} is done")
    console.print(table_of(day, served))


# -- arms ----------------------------------------------------------------------------------------------------------


def planned(
    machine: Machine, day: Day, config: PlannerConfig = PLANNER, estimator: FleetEstimator | None = None
) -> tuple[Served, SimulatedPlanner]:
    """Serve the day with the planner, which finds two engines without roles in the morning.

    estimator: None: that of a cluster's planner
    """
    aims = Aims(ttft_ms=1e3 * (_SLO.ttft_s or 0), itl_ms=1e3 * (_SLO.itl_s or 0))
    settings = config.plan_settings(aims, (1.0, 1.0, 1.0))
    planner = SimulatedPlanner(settings, config.interval_s, SimulationEstimator() if estimator is None else estimator)
    return serve("planner", machine, day, FleetCounts(both=2), planner, config.interval_s), planner


def best_fixed(machine: Machine, day: Day) -> list[Served]:
    """Return the best fleet with which enough requests meet the aims, and the best one with an engine less."""
    found: list[Served] = []
    for num_engines in range(2, _MOST_ENGINES + 1):
        fleets = [FleetCounts(both=num_engines)]
        fleets += [FleetCounts(prefill, num_engines - prefill) for prefill in range(1, num_engines)]
        tried = [(_part_served(machine, day, fleet), fleet) for fleet in fleets]
        share, fleet = max(tried)
        if share >= _ATTAINMENT:
            return [*found[-1:], serve("best fixed fleet", machine, day, fleet)]
        if share > 0:
            found.append(serve("fixed, one engine less", machine, day, fleet))
    return found


def _part_served(machine: Machine, day: Day, fleet: FleetCounts) -> float:
    """Return the part of requests that meet the aims; 0 as soon as too few can."""
    requests = list(day.requests())
    simulation = Simulation(_cluster(machine, fleet), 1, keep_decisions=False, fast_forward=True)
    most_missed, num_over, num_missed = (1 - _ATTAINMENT) * len(requests), 0, 0

    def is_lost() -> bool:
        nonlocal num_over, num_missed
        while (ended := simulation.result_of(num_over)) is not None:
            num_over += 1
            num_missed += not ended.meets(_SLO)
        return num_missed > most_missed

    result = simulation.run(iter(requests), math.inf, is_lost)
    return result.good_share(_SLO) if len(result.requests) == len(requests) and num_missed <= most_missed else 0.0


def autoscaled(machine: Machine, day: Day) -> list[Served]:
    """Return the day with Ray Serve's default target, and with the best target."""
    found: list[tuple[float, Served]] = []
    for target in _TARGETS:
        scaler = ThresholdAutoscaler({EngineRole.BOTH: target}, AutoscalerSettings(max_replicas=_MOST_ENGINES))
        found.append((target, serve(f"autoscaler, target {target:g}", machine, day, FleetCounts(both=2), scaler)))
    enough = [one for _, one in found if one.attainment >= _ATTAINMENT]
    best = min(enough, key=lambda one: one.engine_hours) if enough else max((one for _, one in found), key=_attained)
    return list(dict.fromkeys([found[0][1], best]))


def _attained(one: Served) -> float:
    return one.attainment


def serve(
    name: str,
    machine: Machine,
    day: Day,
    fleet: FleetCounts,
    control: FleetControl | None = None,
    load_window_s: float = PLANNER.interval_s,
) -> Served:
    """Serve the day with these engines; control: changes them"""
    spec = replace(_cluster(machine, fleet), load_window_s=load_window_s)
    result = simulate(spec, day.requests(), seed=1, control=control)
    return Served(name, str(fleet) if control is None else "", result)


def _cluster(machine: Machine, fleet: FleetCounts) -> ClusterSpec:
    """Return a cluster of these engines, whose routes are chosen by cost."""
    engines = [
        EngineSpec(
            f"{role}-{number}",
            role,
            machine.tables,
            machine.shape.num_kv_tokens // HASHED_TOKENS,
            machine.scheduler,
            step_costs=machine.costs,
            itl_s=_SLO.itl_s,
            ttft_s=_SLO.ttft_s,
        )
        for role in PLANNED_ROLES
        for number in range(fleet.of_role(role))
    ]
    return ClusterSpec(
        tuple(engines),
        _LINKS,
        machine.shape.kv_bytes_per_token(),
        RoutingMode.COST,
        _SLO,
        ingress=_NO_LIMITS,
    )


# -- figures -------------------------------------------------------------------------------------------------------


def table_of(day: Day, served: Iterable[Served]) -> Table:
    """Return a row for each arm: engine-hours, what was attained in each part of the day, and changes."""
    parts = list(dict.fromkeys(mark.part for mark in DAY))
    table = Table(title="part of the requests that met the aims, by part of the day")
    for column in ("arm", "engines", "engine-hours", "day", *parts, "changes", "taken back"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for one in served:
        of_part = share_by_part(day, one.result)
        points = one.result.fleet
        most = max(point.serving.num_engines + point.num_starting for point in points)
        engines = one.fleet or f"up to {most}"
        shares = [f"{of_part.get(part, 1.0):.3f}" for part in parts]
        figures = (engines, f"{one.engine_hours:.2f}", f"{one.attainment:.3f}", *shares)
        table.add_row(one.name, *figures, str(len(changes_of(points))), str(num_taken_back(points)))
    return table


def share_by_part(day: Day, result: SimulationResult) -> dict[str, float]:
    """Return the part of the requests that met the aims, for each part of the day."""
    met: dict[str, list[bool]] = {}
    for request in result.requests:
        met.setdefault(day.part_at(request.arrival_s), []).append(request.meets(_SLO))
    return {part: sum(each) / len(each) for part, each in met.items()}


def changes_of(points: Sequence[FleetPoint]) -> list[FleetPoint]:
    """Return the points at which engines began to start, left, or changed their roles."""
    return [
        later
        for one, later in pairwise(points)
        if _num_held(one) != _num_held(later)
        or (one.num_starting == later.num_starting and one.serving != later.serving)
    ]


def num_taken_back(points: Sequence[FleetPoint], within_s: float = _SOON_S) -> int:
    """Return how many changes of the number of engines, or of those of one role, were soon undone."""
    series: list[list[tuple[float, int]]] = [[(point.at_s, _num_held(point)) for point in points]]
    series += [[(point.at_s, point.serving.of_role(role)) for point in points] for role in PLANNED_ROLES]
    return sum(_num_turns(one, within_s) for one in series)


def _num_held(point: FleetPoint) -> int:
    return point.serving.num_engines + point.num_starting


def _num_turns(series: Sequence[tuple[float, int]], within_s: float) -> int:
    """Return how many changes of a number were followed by one in the other direction within so many seconds."""
    steps = [(at_s, later - one) for (_, one), (at_s, later) in pairwise(series) if later != one]
    return sum(one * later < 0 and end_s - at_s < within_s for (at_s, one), (end_s, later) in pairwise(steps))


if __name__ == "__main__":
    typer.run(main)
