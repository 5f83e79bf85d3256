"""Runs simulations, one for each configuration and rate, in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.requests.slo import Slo
from cluster.commands.simulate.simulated_config import EngineSource, cluster_of
from cluster.config import load_cluster_config
from cluster.errors import InvalidConfig
from cluster.simulation.faults.fault_file import FaultPlan, read_fault_file
from cluster.simulation.simulation_result import FleetPoint, Outcome, SimulationResult
from cluster.simulation.simulator import simulate
from cluster.simulation.workloads.trace_workload import trace_requests
from cluster.traces.trace_reader import open_trace

PERCENTS: Final = (50.0, 90.0, 99.0)
_CURVE_POINTS: Final = 201
_CURVE_PERCENTS: Final = tuple(100 * index / (_CURVE_POINTS - 1) for index in range(_CURVE_POINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJob:
    """One simulation. config: the settings' file; None: the default settings; num_requests: None: all of the trace"""

    config: Path | None
    trace: Path
    source: EngineSource
    rate_scale: float = 1.0
    faults: Path | None = None
    seed: int = 0
    num_requests: int | None = None

    @property
    def name(self) -> str:
        """The name of its configuration."""
        return "default" if self.config is None else self.config.stem


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFigures:
    """The figures of one simulation. Durations are in seconds, percentiles those of PERCENTS, over complete requests.

    offered_per_s:  requests that were offered in a second
    itl_s:          of each request the 99th percentile of its own gaps
    good_share:     part of the offered requests that met the aims; None without aims
    goodput_per_s:  of these in a second
    engine_hours:   the time for which engines were there, summed
    busy_share:     part of that time in which they computed
    ttft_curve_s, itl_curve_s: _CURVE_POINTS quantiles of each, evenly spaced, from the least value to the largest one
    fleet:          how many engines there were, over time
    """

    job: SimulationJob
    slo: Slo
    num_requests: int
    outcomes: dict[str, int]
    duration_s: float
    offered_per_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    good_share: float | None
    goodput_per_s: float | None
    engine_hours: float
    busy_share: float
    ttft_curve_s: tuple[float, ...] = ()
    itl_curve_s: tuple[float, ...] = ()
    fleet: tuple[FleetPoint, ...] = ()


def check_job(job: SimulationJob) -> None:
    """Read everything that a simulation reads. Raises InvalidConfig, before any simulation has begun."""
    open_trace(job.trace)
    plan = _fault_plan(job)
    spec = cluster_of(load_cluster_config(job.config, {}, looks_at_model=False), job.source, plan)
    plan.faults_of(spec, f"--faults {job.faults}")


def run_job(job: SimulationJob) -> SimulationFigures:
    """Simulate. Raises InvalidConfig if the workload does not fit the cluster."""
    plan = _fault_plan(job)
    spec = cluster_of(load_cluster_config(job.config, {}, looks_at_model=False), job.source, plan)
    workload = trace_requests(
        open_trace(job.trace), seed=job.seed, rate_scale=job.rate_scale, num_requests=job.num_requests
    )
    try:
        result = simulate(spec, workload, seed=job.seed, faults=plan.faults_of(spec, f"--faults {job.faults}"))
    except ValueError as error:
        raise InvalidConfig(job.name, [str(error)]) from error
    return figures_of(job, spec.slo, result)


def run_jobs(jobs: Sequence[SimulationJob], num_processes: int) -> Iterator[tuple[int, SimulationFigures]]:
    """Yield each simulation's number and figures, as they end."""
    if num_processes == 1 or len(jobs) == 1:
        yield from ((number, run_job(job)) for number, job in enumerate(jobs))
        return
    # Forking a process that has threads, such as the progress bar's, may deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=context) as pool:
        numbers = {pool.submit(run_job, job): number for number, job in enumerate(jobs)}
        try:
            for ended in as_completed(numbers):
                yield numbers[ended], ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def figures_of(job: SimulationJob, slo: Slo, result: SimulationResult) -> SimulationFigures:
    """Sum up a simulation."""
    complete = [one for one in result.requests if one.outcome is Outcome.COMPLETE]
    ttft_s = [one.ttft_s for one in complete]
    itl_s = [one.itl_p99_s for one in complete if one.num_output_tokens > 1]
    arrivals_s = [one.arrival_s for one in result.requests]
    offered_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    has_aims = slo.ttft_s is not None or slo.itl_s is not None
    served_s = result.engine_seconds
    return SimulationFigures(
        job=job,
        slo=slo,
        num_requests=len(result.requests),
        outcomes=dict(Counter(one.outcome.value for one in result.requests)),
        duration_s=result.duration_s,
        offered_per_s=len(result.requests) / offered_s if offered_s > 0 else 0.0,
        ttft_s=_percentiles(ttft_s),
        itl_s=_percentiles(itl_s),
        e2e_s=_percentiles([one.e2e_s for one in complete]),
        good_share=result.good_share(slo) if has_aims else None,
        goodput_per_s=result.goodput(slo) if has_aims and offered_s > 0 else None,
        engine_hours=served_s / 3600,
        busy_share=sum(engine.busy_s for engine in result.engines) / served_s if served_s > 0 else 0.0,
        ttft_curve_s=_percentiles(ttft_s, _CURVE_PERCENTS),
        itl_curve_s=_percentiles(itl_s, _CURVE_PERCENTS),
        fleet=tuple(result.fleet),
    )


def _fault_plan(job: SimulationJob) -> FaultPlan:
    return FaultPlan() if job.faults is None else read_fault_file(job.faults)


def _percentiles(values: Sequence[float], percents: Sequence[float] = PERCENTS) -> tuple[float, ...]:
    """Return the percentiles, or none of them if there are no values."""
    return tuple(np.percentile(np.asarray(values), percents).tolist()) if values else ()
