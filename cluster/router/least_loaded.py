"""The least loaded pair."""

from __future__ import annotations

from collections.abc import Sequence

from actors.core.request import EngineCoreRequest
from cluster.router.base import EngineT, Route, candidates


class LeastLoadedPair:
    """Chooses the prefill and the decode engine with the fewest unfinished requests, each for itself.

    Of equally loaded engines the one with the smaller id is chosen.
    """

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a pair, or one engine for both. The request makes no difference."""
        prefill, decode = candidates(engines)
        return Route(_least_loaded(prefill) if prefill else None, _least_loaded(decode))

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Nothing is learnt from it."""


def _least_loaded(engines: Sequence[EngineT]) -> EngineT:
    return min(engines, key=lambda engine: (engine.num_unfinished_requests, engine.descriptor.engine_id))
