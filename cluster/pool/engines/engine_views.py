"""The status of engines, and of slots without one, as `raypd status` shows it."""

from __future__ import annotations

import asyncio
from typing import Final

from actors.process.ray_calls import RayCallFailed, ask_head
from cluster.observability.status import EngineView
from cluster.pool.engines.engine_fleet import EngineFleet
from cluster.pool.engines.engine_incarnation import EngineIncarnation
from cluster.reconciling.engine_slots import EngineState
from cluster.settings.restarts import RestartConfig

_MISSING_TIMEOUT_S: Final = 1.0


async def engine_views(fleet: EngineFleet, policy: RestartConfig, now_s: float) -> tuple[EngineView, ...]:
    """Return every engine as last observed, then every wanted slot without an engine. now_s: Unix time"""
    views = [engine.view(fleet.history(engine.slot).last_error, await _missing(engine)) for engine in fleet]
    filled = {engine.slot for engine in fleet}
    for slot in fleet.wanted:
        if slot in filled:
            continue
        history = fleet.history(slot)
        state = "quarantined" if history.is_quarantined(now_s, policy) else "waiting"
        incarnation = history.last_incarnation
        views.append(EngineView(slot.engine_id, incarnation, slot.role.value, state, "", history.last_error))
    return tuple(views)


async def _missing(engine: EngineIncarnation) -> str:
    """Return, in words, which resources a pending engine waits for; empty for other engines."""
    if engine.state is not EngineState.PENDING:
        return ""
    try:
        async with asyncio.timeout(_MISSING_TIMEOUT_S):
            return await ask_head(engine.missing)
    except (TimeoutError, RayCallFailed):
        return "Ray's head does not answer"
