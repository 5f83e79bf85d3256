"""Gives new routers the calls that an ingress recorded, and compares every route and the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import BlockHashKey
from actors.core.requests.request import EngineCoreRequest
from actors.costs.step_cost_model import StepCostModel
from actors.recording.decision_digest import value_digest
from actors.recording.read_clock import ReplayedClock
from actors.recording.replay import DecisionDiffers, Recording, Replay
from cluster.errors import NoEngineAvailable
from cluster.routing.base import Route
from cluster.routing.cost_router import CostRouter
from cluster.routing.engine_connection import EngineDescriptor
from cluster.routing.load_book import LoadBook
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.prefix_index import PrefixIndex
from cluster.routing.recording.router_events import (
    CODEC,
    VERSION,
    Announced,
    Chosen,
    IndexCall,
    IndexMade,
    IndexTold,
    Kept,
    Left,
    Over,
    Reported,
    Rerouted,
    RouterHeader,
    RouterMade,
    SessionRoute,
    SessionState,
    Started,
    States,
)


def replay_routers(path: Path) -> Replay:
    """Replay an ingress's recording up to its end, or to the first difference. Raises InvalidRecording."""
    recording = Recording[RouterHeader](path, CODEC, "an ingress")
    header = recording.read_header(RouterHeader, VERSION)
    return recording.replay(f"ingress {header.ingress}", _ReplayedRouting(BlockHashKey(header.hash_key)))


@dataclass(slots=True, eq=False)
class _Session:
    """A session as far as routers see it."""

    number: int
    descriptor: EngineDescriptor
    load_report: LoadReport | None = None
    step_costs: StepCostModel | None = None
    num_unfinished_requests: int = 0
    num_submitted_requests: int = 0
    num_prompt_tokens_computed: int = 0

    def take(self, state: SessionState) -> None:
        self.num_unfinished_requests = state.num_unfinished_requests
        self.num_submitted_requests = state.num_submitted_requests
        self.num_prompt_tokens_computed = state.num_prompt_tokens_computed
        self.descriptor = state.descriptor or self.descriptor
        self.load_report = state.load_report or self.load_report
        self.step_costs = state.step_costs or self.step_costs

    def announce(self, work: SentWork) -> None:
        """Tell nobody: there are no other ingresses."""

    def announce_left(self, work: SentWork) -> None:
        """Tell nobody: there are no other ingresses."""


class _ReplayedRouting:
    """The routers of an ingress, which get the calls that the records have. Implements Replayed."""

    def __init__(self, hash_key: BlockHashKey) -> None:
        self._clock = ReplayedClock()
        self._hash_key = hash_key
        self._book = LoadBook(self._clock)
        self._indexes: dict[int, PrefixIndex] = {}
        self._routers: dict[int, CostRouter] = {}
        self._engines: dict[int, Sequence[_Session]] = {}
        self._sessions: dict[int, _Session] = {}
        self._prompts: dict[str, list[int]] = {}
        self._routes: dict[str, Route[_Session]] = {}
        """The newest route of each request under way."""

    def take(self, event: object) -> bool:
        """Make the call that a record is of. Returns whether a decision was compared. Raises DecisionDiffers."""
        match event:
            case IndexMade():
                self._indexes[event.index] = PrefixIndex(event.max_bytes, self._clock)
                return False
            case RouterMade():
                self._routers[event.router] = self._make_router(event)
                return False
            case Kept():
                self._book.keep(event.engines)
                return False
            case Reported() | Announced() | IndexTold() | Chosen() | Rerouted() | Started() | Over() | Left():
                self._clock.load(event.clock_s)
            case _:
                raise ValueError("a second header")
        match event:
            case Reported():
                self._note(event.states)
                self._book.note_report(self._sessions[event.session])
            case Announced():
                self._note(event.states)
                session = self._sessions[event.session]
                self._book.note_announced(session, event.num_submitted, event.works, event.left)
            case IndexTold():
                self._tell_index(event)
            case Chosen() | Rerouted():
                self._choose(event)
            case Started():
                self._start(event)
            case Over():
                self._note(event.states)
                request, route = self._request(event), self._route_of(event.request.request_id, event.route)
                self._routers[event.router].on_end(request, event.output_token_ids, route)
            case Left():
                self._routers[event.router].on_leave(event.request_id)
                self._prompts.pop(event.request_id, None)
                self._routes.pop(event.request_id, None)
        if not self._clock.is_used_up:
            raise DecisionDiffers("how often the clock was read in a call")
        return isinstance(event, Chosen | Rerouted)

    def _make_router(self, made: RouterMade) -> CostRouter:
        index = self._indexes[made.index]
        pairs = PrefixAwarePair(made.block_size, index, hash_key=self._hash_key, is_aggregated=made.is_aggregated)
        return CostRouter(pairs, self._book, made.mode)

    def _note(self, states: States) -> None:
        for state in states:
            session = self._sessions.get(state.session)
            if session is None:
                if state.descriptor is None:
                    raise ValueError(f"session {state.session} has no engine")
                session = self._sessions[state.session] = _Session(state.session, state.descriptor)
            session.take(state)

    def _tell_index(self, told: IndexTold) -> None:
        index, call = self._indexes[told.index], told.call
        if call is IndexCall.TIDY:
            index.tidy()
            return
        if told.engine is None:
            raise ValueError(f"{call} of no engine")
        keys = np.frombuffer(told.keys, "<u8")
        match call:
            case IndexCall.NOTE_ENGINE:
                index.note_engine(told.engine, told.num_blocks, has_states=told.has_states)
            case IndexCall.FORGET_ENGINE:
                index.forget_engine(told.engine)
            case IndexCall.STORE:
                index.store(told.engine, keys, np.frombuffer(told.positions, "<u4"))
            case IndexCall.DISCARD:
                index.discard(told.engine, keys)
            case IndexCall.BEGIN_SNAPSHOT:
                index.begin_snapshot(told.engine)
            case IndexCall.END_SNAPSHOT:
                index.end_snapshot(told.engine)

    def _choose(self, event: Chosen | Rerouted) -> None:
        self._note(event.states)
        if event.engines is not None:
            self._engines[event.router] = [self._sessions[number] for number in event.engines]
        request, route = self._request(event), None
        router, engines = self._routers[event.router], self._engines[event.router]
        if isinstance(event, Rerouted):
            route = router.reroute(event.waiting_id, request, engines)
        else:
            with suppress(NoEngineAvailable):
                route = router.choose(request, engines)
        if route is not None:
            self._routes[request.request_id] = route
        found = None if route is None else _in_numbers(route)
        if found != event.route:
            raise DecisionDiffers(
                f"request {request.request_id}: the recorded route is {self._named(event.route)}, this one "
                f"{self._named(found)}"
            )

    def _start(self, event: Started) -> None:
        self._note(event.states)
        request, route = self._request(event), self._route_of(event.request.request_id, event.route)
        self._routers[event.router].on_start(request, route)
        decision = None if route.decision is None else value_digest(route.decision)
        if decision != event.decision:
            raise DecisionDiffers(f"request {request.request_id}: the costs by which its route was chosen")

    def _request(self, event: Chosen | Rerouted | Started | Over) -> EngineCoreRequest:
        request = event.request
        if event.has_prompt:
            self._prompts[request.request_id] = request.prompt_token_ids
            return request
        # The object is the same at each call, as it is in an ingress: hashes are kept by it.
        return replace(request, prompt_token_ids=self._prompts[request.request_id])

    def _route_of(self, request_id: str, recorded: SessionRoute) -> Route[_Session]:
        """Return the route that was chosen; another one if the ingress has taken another."""
        known = self._routes.get(request_id)
        if known is not None and recorded.has_reasons and _in_numbers(known) == recorded:
            return known
        prefill = None if recorded.prefill is None else self._sessions[recorded.prefill]
        return Route(prefill, self._sessions[recorded.decode], recorded.prefix_source)

    def _named(self, route: SessionRoute | None) -> str:
        if route is None:
            return "none"
        names = [number for number in (route.prefill, route.decode) if number is not None]
        text = " and ".join(self._sessions[number].descriptor.engine_id for number in names)
        source = route.prefix_source
        return text if source is None else f"{text} with {source.num_tokens} tokens from {source.peer.engine_id}"


def _in_numbers(route: Route[_Session]) -> SessionRoute:
    prefill = None if route.prefill is None else route.prefill.number
    return SessionRoute(prefill, route.decode.number, route.prefix_source, route.reasons is not None)
