"""Describes a cluster's engines to the planner: their roles and states, and how fast they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.costs.step_cost_model import KINDS, MIN_STEPS_OF_KIND, StepCostModel
from cluster.planning.engine_work import EngineSpeed
from cluster.planning.fleet_change import FleetChange, PlannedEngine
from cluster.reconciling.engine_slots import EngineState, Slot
from cluster.reconciling.reconciler import scaled_slots
from cluster.routing.costs.step_prediction import StepFamily, StepPrediction
from cluster.routing.engine_connection import EngineRole
from cluster.routing.reported_work import DEFAULT_BATCHED_TOKENS, DEFAULT_BYTES_PER_S, DEFAULT_ROUND_TRIP_S

_MIN_ROUGH_STEPS: Final = 10 * MIN_STEPS_OF_KIND


def planned_engine(
    slot: Slot, role: EngineRole, state: EngineState, stats: SchedulerStats | None, *, is_wanted: bool
) -> PlannedEngine | None:
    """Describe an engine; None if it is dead. stats: None if none have come; is_wanted: whether its slot is wanted

    An engine that drains although its slot is wanted, as in a rolling update, is about to be replaced: the planner need
    not make up for it.
    """
    if state is EngineState.DEAD:
        return None
    load = None if stats is None else stats.load_report
    return PlannedEngine(
        slot.engine_id,
        role,
        is_serving=state is EngineState.READY,
        is_leaving=not is_wanted,
        num_streams=0 if load is None else load.num_decodes,
        num_cached_tokens=0 if stats is None else cached_tokens(stats),
    )


def cached_tokens(stats: SchedulerStats) -> int:
    """Return the tokens of an engine's cache that later requests are expected to find there.

    A cache whose prompts are never found is worth nothing, so it is the part of looked up tokens that were found, of
    all tokens that the cache holds.
    """
    found = stats.prefix_cache_stats
    part = found.hits / found.queries if found.queries else 0.0
    return round(part * stats.num_blocks * stats.block_size)


def missing_engines(
    wanted: Iterable[Slot], there: Iterable[Slot], roles: Mapping[Slot, EngineRole]
) -> list[PlannedEngine]:
    """Describe the wanted slots without an engine: the next engine of such a slot is about to start."""
    filled = set(there)
    return [
        PlannedEngine(slot.engine_id, roles.get(slot, slot.role), is_serving=False)
        for slot in wanted
        if slot not in filled
    ]


def slots_after(wanted: Iterable[Slot], steps: FleetChange) -> list[Slot]:
    """Return the wanted slots after removals and starts. New slots have the role that their engines start in."""
    slots = [slot for slot in wanted if slot.engine_id not in steps.removals]
    counts = {
        role: sum(slot.role is role for slot in slots) + steps.starts.of_role(role)
        for role in (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH)
        if steps.starts.of_role(role)
    }
    return scaled_slots(slots, counts)


def engine_speed(stats: Mapping[str, SchedulerStats]) -> EngineSpeed | None:
    """Return the speed of an engine as the engines of a cluster tell it, by id; None as long as they know too little.

    Engines of one cluster are taken to be equal; where they differ, the smallest limits count. If no engine is sure of
    its predictions, as on a host that is busy with other work, they are corrected by their median error.
    """
    family = StepFamily()
    for engine_id, one in stats.items():
        family.put(engine_id, one.step_costs)
    prediction = next((found for name in stats if (found := family.prediction(name)) is not None), None)
    if prediction is None:
        prediction = _rough_prediction([one.step_costs for one in stats.values() if one.step_costs is not None])
    loads = [one.load_report for one in stats.values() if one.load_report is not None]
    if prediction is None or not loads:
        return None
    links = [link for load in loads for link in load.links]
    bandwidths = [link.bytes_per_s for link in links if link.bytes_per_s]
    round_trips = [link.round_trip_s for link in links if link.round_trip_s]
    return EngineSpeed(
        *prediction.coefficients,
        max_num_batched_tokens=min(load.max_num_batched_tokens for load in loads) or DEFAULT_BATCHED_TOKENS,
        max_num_seqs=max(min(load.max_num_seqs for load in loads), 1),
        num_kv_tokens=min(load.num_blocks * load.block_size for load in loads),
        num_state_tokens=max(load.num_state_blocks * load.block_size for load in loads),
        kv_bytes_per_token=max(load.kv_bytes_per_token for load in loads),
        link_bytes_per_s=sum(bandwidths) / len(bandwidths) if bandwidths else DEFAULT_BYTES_PER_S,
        link_round_trip_s=sum(round_trips) / len(round_trips) if round_trips else DEFAULT_ROUND_TRIP_S,
        sigma=max(prediction.decode_sigma, prediction.prefill_sigma),
    )


def _rough_prediction(models: Sequence[StepCostModel]) -> StepPrediction | None:
    """Return the predictions of models that are not sure, corrected by their median errors; None without many steps."""
    costs: dict[str, list[float]] = {}
    sigmas = []
    for kind in KINDS:
        known = [(one, model) for model in models for one in model.residuals if one.kind == kind]
        residuals, model = max(known, key=lambda pair: pair[0].num_steps, default=(None, None))
        if residuals is not None and model is not None and residuals.num_steps >= _MIN_ROUGH_STEPS:
            costs[kind] = [(1 + residuals.median) * cost for cost in model.coefficients]
            sigmas.append(residuals.sigma)
    if "decode" not in costs or "prefill" not in costs:
        return None
    sigma = max(sigmas)
    return StepPrediction(
        costs["decode"], costs["prefill"], costs.get("mixed"), decode_sigma=sigma, prefill_sigma=sigma
    )
