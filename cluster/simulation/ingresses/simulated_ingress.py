"""One ingress in virtual time: the product's admission, router and recovery decisions, for simulated clients.

What cluster/requests does with asyncio around these decisions is done here by events. A request is submitted, its
engines' outputs are taken in, and if its decode engine fails it goes on elsewhere as RecoveryDecisions say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from actors.core.blocks.kv_events import KVEventBatch
from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutput, EngineCoreOutputs
from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import FinishReason
from actors.sessions.block_messages import event_messages
from cluster.errors import EngineFailed, NoEngineAvailable, Overloaded
from cluster.planning.offered_load import OfferedLoad
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.overload_control import OverloadControl
from cluster.requests.recovery_decisions import FailedAttempt, RecoveryDecisions, RecoveryPolicy, TryAgain
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.decision import Decision, RoutingMode
from cluster.routing.load_book import LoadBook
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.engine_blocks import BlockReportCounts, EngineBlocks
from cluster.routing.prefixes.prefix_index import PrefixIndex
from cluster.routing.tickets import submission_alone, submission_with_ticket
from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.engines.counted_tokens import TOKEN, WorkloadHasher
from cluster.simulation.engines.simulated_engine import SimulatedEngine
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.ingresses.moves import Flight, Moves
from cluster.simulation.ingresses.request_flight import core_request, offered_request, refused
from cluster.simulation.ingresses.simulated_session import SimulatedSession
from cluster.simulation.simulation_result import Outcome, SimulatedRequest
from cluster.simulation.workloads.workload_request import WorkloadRequest
from kv_transfer.params import TransferRole


class SimulatedIngress:
    """An ingress. Invariant: a flight is in _flights from its first attempt on until on_end was called for it."""

    def __init__(
        self,
        number: int,
        spec: ClusterSpec,
        events: EventQueue,
        on_end: Callable[[int, SimulatedRequest], None],
        decisions: list[Decision] | None,
        tell_others: Callable[[int, SimulatedEngine, Sequence[SentWork], Sequence[SentWork]], None],
    ) -> None:
        """Know no engine yet.

        on_end:      takes what became of a request, with its index
        decisions:   collects routing decisions if wanted
        tell_others: takes what the ingress with a number has sent to an engine, and what has left it, for the others
        """
        self.number = number
        self._tell_others = partial(tell_others, number)
        self._spec = spec
        self._events = events
        self._on_end = on_end
        self._decisions = decisions
        self._block_size = spec.engines[0].block_size
        self._sessions: list[SimulatedSession] = []
        self._serving: list[SimulatedSession] = []
        """The sessions with engines that do not drain; another list whenever they, or their roles, have changed."""
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, tuple[Flight, FailedAttempt, TryAgain]] = {}
        self._policy = RecoveryPolicy(spec.ingress.max_attempts, spec.ingress.recovery_timeout_s)
        limits = spec.ingress
        self._overload = OverloadControl(limits.max_requests_in_flight, limits.max_waiting_tokens, clock=events.clock)
        self._index = PrefixIndex(clock=events.clock)
        self._counts = BlockReportCounts()
        self._book = LoadBook(events.clock)
        self.offered = None if spec.load_window_s is None else OfferedLoad(spec.load_window_s, events.now_s, number)
        pairs = PrefixAwarePair(
            self._block_size,
            self._index,
            hash_key=PUBLIC_KEY,
            is_aggregated=spec.routing_mode is RoutingMode.AGGREGATE,
            hasher=WorkloadHasher(self._block_size),
        )
        slo = spec.slo
        self._router = CostRouter(pairs, self._book, spec.routing_mode, ttft_s=slo.ttft_s, itl_s=slo.itl_s)
        self._rerouting = Rerouting(self._book, lambda delay_s, look: events.at(events.now_s + delay_s, look))
        self._moves = Moves(lambda: self._serving, self._router, self._book, spec.routing_mode, events.clock)

    # -- engines come and go, and report -------------------------------------------------------------------------

    def on_engine(self, engine: SimulatedEngine) -> SimulatedSession:
        """Open a session with an engine that serves from now on; requests that wait for one try again."""
        key, spec = engine.descriptor.key, engine.spec
        blocks = EngineBlocks(key, self._index, self._block_size, self._counts, clock=self._events.clock)
        if blocks.on_size(spec.num_blocks, spec.block_size):
            for part in engine.cache_snapshot():
                blocks.take(part)
        session = SimulatedSession(engine, self.number, blocks, self._tell_others)
        self._sessions = [*self._sessions, session]
        self._serving = [*self._serving, session]
        self._book.note_report(session)
        waiting, self._waiting = self._waiting, {}
        for flight, failed, decision in waiting.values():
            self._go_on(flight, failed, decision)
        return session

    def on_engine_lost(self, engine: SimulatedEngine) -> None:
        """Give an engine up that has died, or is silent, and let its requests go on elsewhere."""
        lost = self._session_of(engine)
        if lost is None:
            return
        lost.is_open = False
        self._sessions = [session for session in self._sessions if session is not lost]
        self._serving = [session for session in self._serving if session is not lost]
        self._book.keep([session.descriptor.key for session in self._sessions])
        self._index.forget_engine(engine.descriptor.key)
        for flight in list(self._flights.values()):
            if flight.route is None:
                continue
            if flight.move is not None and flight.move.target is lost:
                self._moves.on_target_lost(flight)
            if flight.route.decode is lost and flight.move is not None:
                self._take_over(flight)
            elif flight.route.decode is lost:
                reason = f"engine {engine.descriptor.engine_id} has died"
                self._fail(flight, reason, can_resume=True)
            elif flight.route.prefill is lost:
                flight.is_prefilling = False

    def on_draining(self, engine: SimulatedEngine) -> None:
        """Give an engine no new requests from now on."""
        self._serving = [session for session in self._serving if session.engine is not engine]

    def on_role(self, engine: SimulatedEngine) -> None:
        """Take in that an engine has changed its role: the next request's route goes by it."""
        session = self._session_of(engine)
        if session is not None:
            session.descriptor = engine.descriptor
            self._serving = list(self._serving)

    def on_report(
        self, session: SimulatedSession, report: LoadReport, num_waiting: int, events: KVEventBatch | None
    ) -> None:
        """Take in an engine's report on its load, and on what has entered and left its cache."""
        session.load_report, session.num_waiting_requests = report, num_waiting
        session.reported_at_s = self._events.now_s
        session.num_prompt_tokens_computed = session.engine.scheduler.stats.num_prompt_tokens_computed
        if events is not None:
            for message in event_messages(events):
                session.blocks.take(message)
        self._book.note_report(session)

    def on_announced(
        self, engine: SimulatedEngine, num_submitted: int, works: Sequence[SentWork], left: Sequence[SentWork]
    ) -> None:
        """Take in what another ingress has sent to an engine, and what has left; see LoadBook.note_announced()."""
        session = self._session_of(engine)
        if session is not None:
            self._book.note_announced(session, num_submitted, works, left)

    def knows(self, engine: SimulatedEngine) -> bool:
        """Whether there is a session with an engine."""
        return self._session_of(engine) is not None

    def _session_of(self, engine: SimulatedEngine) -> SimulatedSession | None:
        return next((session for session in self._sessions if session.engine is engine), None)

    # -- requests ------------------------------------------------------------------------------------------------

    def take(self, index: int, offered: WorkloadRequest) -> None:
        """Take a client's request. index: of the request in its workload"""
        if self.offered is not None:
            self.offered.arrive(self._events.now_s, offered.num_prompt_tokens)
        try:
            admitted = self._overload.enter()
        except Overloaded:
            self._refuse(index, offered)
            return
        try:
            admitted.queue(offered.num_prompt_tokens, None)
        except Overloaded:
            with admitted:
                pass  # The ingress does not count the request any more.
            self._refuse(index, offered)
            return
        if offered.request_id in self._flights:
            raise ValueError(f"another request with the id {offered.request_id} is on its way: give each its own")
        original = core_request(index, offered, self._events.now_s)
        flight = Flight(index, offered, RecoveryDecisions(original, self._policy), admitted)
        try:
            self._submit(flight)
        except NoEngineAvailable:
            self._close(flight, Outcome.REFUSED)

    def _refuse(self, index: int, offered: WorkloadRequest) -> None:
        if self.offered is not None:
            self.offered.refuse(self._events.now_s)
        self._on_end(index, refused(offered))

    def on_outputs(self, engine: SimulatedEngine, outputs: EngineCoreOutputs) -> None:
        """Take in what an engine has sent, but for the tokens of requests that decode steadily."""
        for output in outputs.others:
            flight = self._flights.get(output.request_id)
            if flight is not None and output.attempt == flight.submitted.attempt:
                self._take(flight, engine, output)
            elif (moving := self._moves.flights.get(output.request_id)) is not None:
                old_id = moving.request_id
                if self._moves.is_over(moving, output):
                    self._rename(moving, old_id)
                    self._take(moving, engine, output)

    def _take_over(self, flight: Flight) -> None:
        """Let the target of a move go on with a request whose engine has failed."""
        old_id = flight.request_id
        self._moves.settle(flight)
        self._rename(flight, old_id)

    def _rename(self, flight: Flight, old_id: str) -> None:
        """Note that the request's engine has it under another id."""
        del self._flights[old_id]
        self._flights[flight.request_id] = flight

    def _take(self, flight: Flight, engine: SimulatedEngine, output: EngineCoreOutput) -> None:
        route = flight.route
        assert route is not None, "an attempt has a route"
        is_decode = route.decode.engine is engine
        is_first = flight.num_attempts == 1 and not flight.num_moves
        # What a decode engine has of a handoff's prompt was computed by the prefill engine all the same.
        computes_prompt = route.prefill is None or not is_decode
        if output.timings is not None and not flight.num_cached_tokens and is_first and computes_prompt:
            flight.num_cached_tokens = output.timings.num_cached_tokens
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            if is_decode:
                flight.close_log(output.first_position)
                if flight.move is not None:
                    self._take_over(flight)
                    return
                can_resume = output.end_cause is EndCause.INPUTS_MISSING
                self._fail(flight, output.error or "the engine has ended it", can_resume=can_resume)
            else:
                self._leave_prefill(flight)
            return
        if is_decode and output.new_token_ids:
            flight.has_decoded = True
            self._moves.cancel(flight)
            if flight.is_prefilling and not flight.num_tokens:
                self._abort_prefill(flight, route)
        if is_decode or output.new_token_ids:
            self._note(flight, engine, output, is_decode=is_decode)
        if is_decode and output.preemption is not None and self._spec.ingress.move_preempted:
            self._moves.on_preemption(flight, output.preemption)
        if output.finish_reason is not None:
            self._finish(flight, route)
        elif not is_decode and output.finished:
            self._leave_prefill(flight)

    def _note(self, flight: Flight, engine: SimulatedEngine, output: EngineCoreOutput, *, is_decode: bool) -> None:
        if not is_decode and flight.num_tokens > output.first_position:
            return  # The decode engine was quicker: the client has this token.
        self._rerouting.forget(flight.request_id)
        flight.take(output, engine.log, self._events.now_s)

    def _submit(self, flight: Flight) -> None:
        """Begin an attempt. Raises NoEngineAvailable."""
        self._submit_to(flight, flight.decisions.choose_route(self._router, self._serving))

    def _reroute(self, flight: Flight) -> bool:
        """Submit a request, whose prompt waits, to another engine if the router says so. Returns whether it did."""
        route = flight.decisions.reroute(self._router, [], self._serving)
        if route is None:
            return False
        self._end_attempt(flight)
        self._submit_to(flight, route)
        return True

    def _submit_to(self, flight: Flight, route: Route[SimulatedSession]) -> None:
        if self._decisions is None:
            # Nobody reads why, so that it need not be said.
            route = Route(route.prefill, route.decode, route.prefix_source)
        request = flight.decisions.request
        self._flights[request.request_id] = flight
        flight.begin(route)
        if route.prefill is None:
            route.decode.submit(submission_alone(request, route))
        else:
            route.decode.submit(submission_with_ticket(request, route, TransferRole.CONSUMER))
            route.prefill.submit(submission_with_ticket(request, route, TransferRole.PRODUCER))
        self._router.on_start(request, route)
        if self._decisions is not None and route.decision is not None:
            self._decisions.append(route.decision)
        if self._spec.ingress.reroute_waiting and self._spec.routing_mode is RoutingMode.COST:
            self._rerouting.wait(request.request_id, route.computing.descriptor.key, partial(self._reroute, flight))

    def _finish(self, flight: Flight, route: Route[SimulatedSession]) -> None:
        self._router.on_end(flight.decisions.original, [TOKEN] * flight.num_tokens, route)
        self._end_attempt(flight)
        self._close(flight, Outcome.COMPLETE)

    def _close(self, flight: Flight, outcome: Outcome) -> None:
        with flight.admitted:
            pass  # The ingress does not count the request any more.
        result = flight.result(outcome)
        if self.offered is not None and outcome is not Outcome.REFUSED and result.num_output_tokens:
            self.offered.end(offered_request(result), self._events.now_s)
        self._on_end(flight.index, result)

    def _end_attempt(self, flight: Flight) -> None:
        """Forget the attempt, and abort what an engine still has of it."""
        request_id, route = flight.request_id, flight.route
        assert route is not None, "an attempt has a route"
        self._moves.cancel(flight)
        self._rerouting.forget(request_id)
        for submitted_id in flight.submitted_ids:
            self._router.on_leave(submitted_id)
        self._flights.pop(request_id, None)
        route.decode.num_unfinished_requests -= 1
        route.decode.engine.abort(request_id)
        if flight.is_prefilling:
            self._abort_prefill(flight, route)

    def _abort_prefill(self, flight: Flight, route: Route[SimulatedSession]) -> None:
        assert route.prefill is not None, "only a handoff has a prefill engine"
        route.prefill.engine.abort(flight.request_id)
        self._leave_prefill(flight)

    def _leave_prefill(self, flight: Flight) -> None:
        route = flight.route
        if flight.is_prefilling and route is not None and route.prefill is not None:
            route.prefill.num_unfinished_requests -= 1
            flight.is_prefilling = False

    @property
    def num_in_flight(self) -> int:
        """Requests that have come and not ended."""
        return len(self._flights) + len(self._waiting)

    def unfinished(self) -> list[tuple[int, SimulatedRequest]]:
        """Return what the requests that are still on their way have got, with their indices; at the end."""
        flights = [*self._flights.values(), *(flight for flight, _, _ in self._waiting.values())]
        for flight in flights:
            self._close_log(flight)
        return [(flight.index, flight.result(Outcome.UNFINISHED)) for flight in flights]

    def _close_log(self, flight: Flight) -> None:
        """Take in the tokens that the decode engine has given so far."""
        if flight.route is not None:
            num_tokens = flight.route.decode.engine.num_output_tokens(flight.request_id)
            flight.close_log(flight.num_tokens if num_tokens is None else num_tokens)

    # -- recovery ------------------------------------------------------------------------------------------------

    def _fail(self, flight: Flight, reason: str, *, can_resume: bool) -> None:
        """End an attempt whose decode engine has failed, and begin another one if the decisions say so."""
        route = flight.route
        assert route is not None, "an attempt has a route"
        self._close_log(flight)
        engines = [route.decode] if flight.has_decoded or route.prefill is None else [route.decode, route.prefill]
        lost = {session.descriptor.key for session in engines if session.engine.is_dead} | flight.lost_targets
        error = EngineFailed(flight.request_id, reason, num_new_tokens=flight.num_tokens, can_resume=can_resume)
        failed = FailedAttempt(error, [TOKEN] * flight.num_tokens, lost, has_decoded=flight.has_decoded)
        self._end_attempt(flight)
        decision = flight.decisions.after_failure(failed, self._events.now_s)
        if isinstance(decision, TryAgain):
            self._go_on(flight, failed, decision)
        else:
            self._close(flight, Outcome.FAILED if can_resume or flight.num_tokens else Outcome.REFUSED)

    def _go_on(self, flight: Flight, failed: FailedAttempt, decision: TryAgain) -> None:
        try:
            self._submit(flight)
        except NoEngineAvailable:
            if flight.request_id not in self._waiting:
                self._events.at(max(decision.limit_s, self._events.now_s), self._give_up, flight.request_id)
            self._waiting[flight.request_id] = flight, failed, decision

    def _give_up(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._close(waiting[0], Outcome.FAILED)
