"""A router that draws each route among all that are possible, so that tests see every way with every engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import NoEngineAvailable
from cluster.routing.base import EngineT, Route
from cluster.routing.decision import Way
from cluster.routing.engine_connection import EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
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
        routes = possible_routes(engines)
        if not routes:
            raise NoEngineAvailable
        wanted = [route for route in routes if way_of(route) is self._way]
        name = request.request_id.partition("-")[0]
        return random.Random(f"{self._seed} {name} {request.attempt}").choice(wanted or routes)
