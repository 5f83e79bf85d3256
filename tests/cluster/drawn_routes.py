"""A router that draws each route among all that are possible, so that tests see every way with every engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import Way
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.routing.load_book import LoadBook
from cluster.routing.pairing import find_refusal


def way_of(route: Route[EngineT]) -> Way:
    """The way of a route, by the roles that its engines have now."""
    if route.prefill is not None:
        return Way.PREFILL_DECODE
    return Way.DECODE_ALONE if route.decode.descriptor.role is EngineRole.DECODE else Way.PREFILL_ALONE


def possible_routes(engines: Sequence[EngineT]) -> list[Route[EngineT]]:
    """All routes that the router by cost compares: engines that do all, and pairs whose handoff rank rises."""
    able = [engine for engine in engines if engine.descriptor.role is not EngineRole.ENCODE]
    routes = [Route(None, engine) for engine in able]
    for producer in able:
        for consumer in able:
            one, other = producer.descriptor, consumer.descriptor
            is_pair = one.role.computes_prompts and other.role.generates and one.handoff_rank < other.handoff_rank
            if is_pair and find_refusal(one, other) is None:
                routes.append(Route(producer, consumer))
    return routes


class DrawnRoutes(LeastLoadedPair):
    """Draws by the name that the client gave the request, and the attempt: again the same in another run."""

    def __init__(self, way: Way | None = None, *, seed: int = 0) -> None:
        """way: the only way of routes as long as it is possible; None: every way"""
        self._way = way
        self._seed = seed

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Draw a route. Raises NoEngineAvailable."""
        return self._draw(request).choice(self._wanted(engines))

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Draw whether the request goes elsewhere, and where."""
        if not possible_routes(engines):
            return None
        return self._draw(again).choice([None, *self._wanted(engines)])

    def _draw(self, request: EngineCoreRequest) -> random.Random:
        return random.Random(f"{self._seed} {request.request_id.partition('-')[0]} {request.attempt}")

    def _wanted(self, engines: Sequence[EngineT]) -> list[Route[EngineT]]:
        if not (routes := possible_routes(engines)):
            raise NoEngineAvailable
        return [route for route in routes if way_of(route) is self._way] or routes


class EndlessQueues(LoadBook):
    """A load book by which every prompt waits for a while yet, so that a Rerouting looks at all of them."""

    def starts_in_s(self, engine: EngineKey, request_id: str) -> float:
        return 1.0
