"""Routes requests to the engines that have the fewest unfinished requests."""

from __future__ import annotations

from collections.abc import Sequence

from actors.core.requests.request import EngineCoreRequest
from cluster.routing.base import EngineT, Route, choose_pair


class LeastLoadedPair:
    """Chooses the pair of engines that has the fewest unfinished requests.

    Of equally loaded engines one is drawn by the request's id.
    """

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a pair, or one engine that prefills and decodes. Raises NoEngineAvailable."""
        return Route(*choose_pair(engines, lambda engine: engine.num_unfinished_requests, request.request_id))

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Let the request stay where it is."""
        return None

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Do nothing: engines count their requests themselves."""

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Do nothing: engines count their requests themselves."""

    def on_leave(self, request_id: str) -> None:
        """Do nothing: engines count their requests themselves."""
