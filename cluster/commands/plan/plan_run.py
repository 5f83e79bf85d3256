"""Makes the plan of `raypd plan` from its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.bench.objectives import parse_objectives
from cluster.commands.plan.plan_inputs import SpeedSource, offered_requests, read_speed
from cluster.config import load_cluster_config
from cluster.errors import InvalidConfig
from cluster.planning.fleet_counts import FleetLimits
from cluster.planning.fleet_estimate import ClosedFormEstimator, PlanAims
from cluster.planning.offline_plan import OfflinePlan, OfflinePlanSettings, plan_offline
from cluster.simulation.fleet_estimator import SimulationEstimator
from cluster.simulation.timing.roofline import GUESS_ERROR
from cluster.traces.trace_reader import open_trace
from cluster.traces.trace_request import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `raypd plan`. budget: GPUs; None: any number; simulates: fleets are simulated"""

    trace: Path
    slo: tuple[str, ...]
    config_file: Path | None
    source: SpeedSource
    budget: int | None
    attainment: float
    scale_rate: float
    num_prompts: int | None
    seed: int
    simulates: bool = False


def make_plan(options: PlanOptions) -> tuple[OfflinePlan, PlanAims, str]:
    """Return the plan, the aims, and a warning if nothing was measured. Raises InvalidConfig."""
    aims = read_aims(options.slo, options.attainment)
    num_ranks = options.source.num_ranks
    if options.budget is not None and options.budget < num_ranks:
        raise InvalidConfig("--budget", [f"{options.budget} GPUs are too few for one engine, which takes {num_ranks}"])
    config = load_cluster_config(options.config_file, {}, looks_at_model=False)
    speed, warning = read_speed(options.source, config.scheduler)
    trace = open_trace(options.trace).requests(options.seed, options.num_prompts)
    requests = offered_requests(trace, speed.num_kv_tokens // BLOCK_TOKENS, options.scale_rate)
    ranks = float(num_ranks)
    limits = FleetLimits(
        max_gpus=None if options.budget is None else float(options.budget), gpus_per_engine=(ranks, ranks, ranks)
    )
    settings = OfflinePlanSettings(
        aims=aims,
        limits=limits,
        num_requests=min(config.planner.estimate_requests, len(requests)),
        num_estimates=config.planner.max_estimates,
        step_error=GUESS_ERROR if warning else None,
        seed=options.seed,
    )
    estimator = SimulationEstimator(config.routing.mode) if options.simulates else ClosedFormEstimator()
    return plan_offline(requests, speed, settings, estimator), aims, warning


def read_aims(texts: tuple[str, ...], attainment: float) -> PlanAims:
    """Return the aims of --slo. Raises InvalidConfig for figures other than ttft and itl."""
    objectives = parse_objectives(texts)
    if others := objectives.keys() - {"ttft", "itl"}:
        raise InvalidConfig("--slo", [f"{', '.join(sorted(others))}: a plan can be made for ttft and itl"])
    return PlanAims(objectives.get("ttft"), objectives.get("itl"), attainment)
