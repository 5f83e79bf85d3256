"""Moves of preempted requests in virtual time: what the ingress does around the product's MigrationPlanner.

A request that was preempted stays where it is, and is submitted to another engine, its target, as well. Whichever gives
the next token keeps it, and the other one is told to abort. If one of them fails, the other goes on.

As in a cluster, the target may fetch the blocks that are still cached at the first engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, Preemption
from cluster.requests.moves.migration import EngineStats, MigrationPlanner
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.decision import RoutingMode
from cluster.routing.load_book import LoadBook
from cluster.simulation.engines.counted_tokens import TOKEN
from cluster.simulation.ingresses.request_flight import Move, RequestFlight
from cluster.simulation.ingresses.simulated_session import SimulatedSession

Flight = RequestFlight[SimulatedSession]


class Moves:
    """The moves of one ingress's requests. Invariant: flights has a request's flight iff the request has a move."""

    def __init__(
        self,
        sessions: Callable[[], Sequence[SimulatedSession]],
        router: CostRouter,
        book: LoadBook,
        mode: RoutingMode,
        clock: Callable[[], float],
    ) -> None:
        """sessions: returns those with engines that serve"""
        self._sessions = sessions
        self._router = router
        self.clock = clock
        self._planner = MigrationPlanner(self._stats, clock, mode=mode, load_book=book)
        self.flights: dict[str, Flight] = {}
        """The flight of each request that a target has, by the request's id there."""

    def _stats(self) -> EngineStats:
        known = ((session.descriptor.key, session.stats()) for session in self._sessions())
        return {key: stats for key, stats in known if stats is not None}

    def on_preemption(self, flight: Flight, preemption: Preemption) -> None:
        """Submit a preempted request to another engine as well, if one has room and will be quicker than waiting."""
        route = flight.route
        if route is None or flight.move is not None or flight.is_prefilling:
            return
        here, preempted = route.decode.descriptor, flight.decisions.preempted(flight.num_tokens, preemption)
        target = self._planner.find_target(preempted, here, self._sessions())
        if target is None:
            return
        request = flight.decisions.migrate([TOKEN] * flight.num_tokens, here, preemption)
        flight.move = Move(request, target)
        flight.submitted_ids.append(request.request_id)
        self.flights[request.request_id] = flight
        target.submit(request)
        self._router.on_start(request, Route(None, target))

    def settle(self, flight: Flight) -> None:
        """Let the target keep the request: it gave the next token, or the first engine has failed."""
        move, route = flight.move, flight.route
        assert move is not None, "only a move is settled"
        assert route is not None, "a request with a move is at an engine"
        old_id, old = flight.request_id, route.decode
        flight.move = None
        del self.flights[move.request.request_id]
        flight.submitted, flight.route = move.request, Route(route.prefill, move.target)
        flight.num_moves += 1
        old.num_unfinished_requests -= 1
        old.engine.abort(old_id)

    def cancel(self, flight: Flight) -> None:
        """Let the first engine keep the request, if the request has a move: that engine was quicker."""
        move = flight.move
        if move is not None:
            self._end(flight, move)
            move.target.engine.abort(move.request.request_id)

    def on_target_lost(self, flight: Flight) -> None:
        """Give a move up whose target has died, or is silent. The request may be what has killed the target."""
        move = flight.move
        assert move is not None, "only a move has a target"
        self._end(flight, move)
        if move.target.engine.is_dead:
            flight.lost_targets.add(move.target.descriptor.key)
            flight.has_decoded = False

    def is_over(self, flight: Flight, output: EngineCoreOutput) -> bool:
        """Take in what a target has sent. Returns whether the target has the request from now on, with this output."""
        move = flight.move
        assert move is not None, "only a move has a target"
        if output.new_token_ids:
            self.settle(flight)
            return True
        if output.finish_reason is not None:
            self._end(flight, move)
        return False

    def _end(self, flight: Flight, move: Move[SimulatedSession]) -> None:
        flight.move = None
        del self.flights[move.request.request_id]
        move.target.num_unfinished_requests -= 1
