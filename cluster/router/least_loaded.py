"""The least loaded pair."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine_connection import EngineRole
from cluster.errors import NoEngineAvailable
from cluster.router.base import EngineT, Route


class LeastLoadedPair:
    """Chooses the prefill and the decode engine with the fewest unfinished requests, each for itself.

    A pair of engines that do nothing else comes first; engines of role `both` serve, alone, when there is no such pair.
    Of equally loaded engines the one with the smaller id is chosen.
    """

    def choose(self, num_prompt_tokens: int, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a pair, or one engine for both. The prompt's length makes no difference here."""
        by_role: dict[EngineRole, list[EngineT]] = {role: [] for role in EngineRole}
        for engine in engines:
            by_role[engine.descriptor.role].append(engine)
        if by_role[EngineRole.PREFILL] and by_role[EngineRole.DECODE]:
            return Route(_least_loaded(by_role[EngineRole.PREFILL]), _least_loaded(by_role[EngineRole.DECODE]))
        if by_role[EngineRole.BOTH]:
            return Route(None, _least_loaded(by_role[EngineRole.BOTH]))
        missing = tuple(role.value for role in (EngineRole.PREFILL, EngineRole.DECODE) if not by_role[role])
        raise NoEngineAvailable(missing)


def _least_loaded(engines: Sequence[EngineT]) -> EngineT:
    return min(engines, key=lambda engine: (engine.num_unfinished_requests, engine.descriptor.engine_id))
