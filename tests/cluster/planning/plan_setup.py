"""Engines, windows of load and settings from which the tests of the planner start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from actors.costs.step_shape import FEATURES
from cluster.planning.engine_work import EngineSpeed
from cluster.planning.fleet_change import PlannedEngine, SwitchTimes
from cluster.planning.fleet_counts import PLANNED_ROLES, FleetCounts, FleetLimits
from cluster.planning.fleet_estimate import PlanAims
from cluster.planning.offered_load import LoadWindow, OfferedRequest
from cluster.planning.plan_record import PlanInputs, PlannerMode, PlanSettings
from cluster.routing.engine_connection import EngineRole

WINDOW_S: Final = 30.0
COSTS: Final = tuple(
    {"step": 5e-3, "token": 1e-4, "decode": 1e-4, "decode_context_token": 1e-8}.get(name, 0.0) for name in FEATURES
)
"""A decode step of n requests takes 5 ms and 0.2 ms for each; a prompt of 1000 tokens takes 105 ms."""
SPEED: Final = EngineSpeed(COSTS, COSTS, COSTS, max_num_batched_tokens=2048, max_num_seqs=64, num_kv_tokens=200_000)
CHAT: Final = (1000, 100)
"""Tokens of a prompt and of its output: an engine does about ten of the prompts a second, and 35 of the outputs."""
REASONING: Final = (100, 1500)
SETTINGS: Final = PlanSettings(
    aims=PlanAims(ttft_s=1.0, itl_s=0.02, attainment=0.9),
    limits=FleetLimits(max_engines=16),
    horizon_s=600.0,
    down_window_s=300.0,
    change_timeout_s=300.0,
    hold_s=120.0,
    quantile=0.9,
    num_requests=200,
    num_estimates=24,
)
TIMES: Final = SwitchTimes(start_s=60.0, drain_s=10.0)


def window(number: int, rate: float, lengths: tuple[int, int] = CHAT, num_refused: int = 0) -> LoadWindow:
    """Return a window in which `rate` equal requests arrived and ended each second, evenly spread."""
    num = round(rate * WINDOW_S)
    requests = [OfferedRequest((number + i / max(num, 1)) * WINDOW_S, lengths[0], 0, lengths[1]) for i in range(num)]
    return LoadWindow(
        number,
        num_offered=num,
        num_refused=num_refused,
        num_sized=num,
        num_prompt_tokens=num * lengths[0],
        num_ended=num,
        num_ended_prompt_tokens=num * lengths[0],
        num_computed_tokens=sum(one.num_computed_tokens for one in requests),
        num_prefill_pairs=sum(one.num_prefill_pairs for one in requests),
        num_decode_steps=sum(one.num_decode_steps for one in requests),
        num_decode_context_tokens=sum(one.num_decode_context_tokens for one in requests),
        sample=tuple(requests[:: num // 64 + 1]),
    )


def windows(rates: Iterable[float], lengths: tuple[int, int] = CHAT, first: int = 1000) -> tuple[LoadWindow, ...]:
    """Return consecutive windows with these rates."""
    return tuple(window(first + index, rate, lengths) for index, rate in enumerate(rates))


def fleet(prefill: int = 0, decode: int = 0, both: int = 0, *, num_cached_tokens: int = 0) -> list[PlannedEngine]:
    """Return engines that serve, with a stream each."""
    counts = FleetCounts(prefill, decode, both)
    return [
        PlannedEngine(f"{role.value}-{number}", role, num_streams=1, num_cached_tokens=num_cached_tokens)
        for role in PLANNED_ROLES
        for number in range(counts.of_role(role))
    ]


def inputs(load: Sequence[LoadWindow], engines: Sequence[PlannedEngine], **changes: object) -> PlanInputs:
    """Return what the planner is told a second after the newest window. changes: other fields"""
    now_s = (load[-1].number + 1) * WINDOW_S + 1.0 if load else 30_000.0
    told = PlanInputs(now_s, WINDOW_S, tuple(load), tuple(engines), TIMES, SETTINGS, speed=SPEED, mode=PlannerMode.ACT)
    return msgspec.structs.replace(told, **changes)


def with_role(engine_id: str, role: EngineRole, engines: Iterable[PlannedEngine]) -> list[PlannedEngine]:
    """Return the engines with another role for one of them."""
    return [msgspec.structs.replace(one, role=role) if one.engine_id == engine_id else one for one in engines]
