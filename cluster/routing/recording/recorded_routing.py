"""Routers, a load book and prefix indexes that record their calls and what they choose.

The choices are those of the router within; an ingress has these in place of the plain ones if it records its decisions.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from actors.core.outputs.sent_work import SentWork
from actors.core.requests.block_hash import BlockHashKey
from actors.core.requests.request import EngineCoreRequest
from actors.recording.decision_digest import value_digest
from actors.recording.read_clock import ReadClock
from actors.recording.recording_file import RecordingFile
from actors.recording_config import DecisionRecordingConfig
from cluster.routing.base import EngineLoad, EngineT, Route, Router
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineKey
from cluster.routing.load_book import LoadBook
from cluster.routing.prefixes.prefix_index import BlockKeys, PrefixIndex
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
    RouterEvent,
    RouterHeader,
    RouterMade,
    SessionRoute,
    SessionState,
    Started,
)
from cluster.routing.reported_work import ReportingEngine

logger = logging.getLogger(__name__)
_MAX_PROMPTS: Final = 1 << 16
"""The number of requests under way whose prompts are written only once; those of others are written with each call."""


class RoutingRecorder:
    """The recording of one ingress, and the numbers that its records have for sessions, indexes and routers."""

    def __init__(self, file: RecordingFile, ingress: str, hash_key: BlockHashKey) -> None:
        self.clock = ReadClock()
        self._file = file
        self._num_indexes = self._num_routers = self._num_sessions = 0
        self._known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()
        self.note(RouterHeader(VERSION, ingress, hash_key.value))

    @classmethod
    def begin(cls, settings: DecisionRecordingConfig | None, ingress: str, hash_key: BlockHashKey) -> Self | None:
        """Begin a recording; None if none is wanted, or if its file cannot be made, which is logged."""
        if settings is None:
            return None
        try:
            file = RecordingFile(settings.directory, f"ingress-{ingress}", settings.max_file_mib << 20)
        except OSError as error:
            logger.warning("the ingress's routes are not recorded", extra={"reason": str(error)})
            return None
        logger.info("the ingress's routes are recorded", extra={"path": str(file.path)})
        return cls(file, ingress, hash_key)

    def make_index(self, max_bytes: int) -> RecordedPrefixIndex:
        """Make a prefix index."""
        self._num_indexes += 1
        self.note(IndexMade(self._num_indexes, max_bytes))
        return RecordedPrefixIndex(self, self._num_indexes, max_bytes)

    def make_router(
        self, router: Router, index: PrefixIndex, block_size: int, mode: RoutingMode, *, is_aggregated: bool
    ) -> Router:
        """Return a router that chooses as the given one does, and records its calls."""
        assert isinstance(index, RecordedPrefixIndex), "an ingress that records has recorded indexes"
        self._num_routers += 1
        self.note(RouterMade(self._num_routers, index.number, block_size, mode, is_aggregated))
        return RecordedRouter(self, self._num_routers, router)

    def note(self, event: RouterEvent) -> None:
        """Add a record."""
        if self._file.is_open:
            self._file.write(CODEC.encode(event))

    @property
    def is_open(self) -> bool:
        """Whether the recording goes on."""
        return self._file.is_open

    def close(self) -> None:
        """End the recording."""
        self._file.close()

    def number_of(self, engine: EngineLoad | ReportingEngine) -> int:
        """Return the number of a session, a new one at the first call."""
        return self._known_of(engine).number

    def states_of(self, engines: Iterable[EngineLoad | ReportingEngine]) -> tuple[SessionState, ...]:
        """Return what has changed of these sessions since the last record about them."""
        return tuple(state for engine in engines if (state := self._known_of(engine).change(engine)) is not None)

    def request_of(self, request: EngineCoreRequest) -> tuple[EngineCoreRequest, bool]:
        """Return a request, without its prompt if a record has that already, and whether the prompt is there.

        Image inputs decide nothing here, and are left out.
        """
        plain = replace(request, encoder_inputs=()) if request.encoder_inputs else request
        if self._prompts.get(request.request_id) is request.prompt_token_ids:
            return replace(plain, prompt_token_ids=[]), False
        self._prompts[request.request_id] = request.prompt_token_ids
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return plain, True

    def forget_prompt(self, request_id: str) -> None:
        """Forget the prompt of a request that has ended."""
        self._prompts.pop(request_id, None)

    def _known_of(self, engine: EngineLoad | ReportingEngine) -> _Known:
        known = self._known.get(engine)
        if known is None:
            self._num_sessions += 1
            known = self._known[engine] = _Known(self._num_sessions)
        return known


class _Known:
    """Keeps the newest state of a session that the recording has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._counts: tuple[int, int, int] | None = None
        self._values: tuple[object, object, object] = (None, None, None)

    def change(self, engine: EngineLoad | ReportingEngine) -> SessionState | None:
        counts = (
            getattr(engine, "num_unfinished_requests", 0),
            getattr(engine, "num_submitted_requests", 0),
            getattr(engine, "num_prompt_tokens_computed", 0),
        )
        values = engine.descriptor, getattr(engine, "load_report", None), getattr(engine, "step_costs", None)
        is_new = [value is not known for value, known in zip(values, self._values, strict=True)]
        if counts == self._counts and not any(is_new):
            return None
        self._counts, self._values = counts, values
        return SessionState(
            self.number,
            *counts,
            values[0] if is_new[0] else None,
            values[1] if is_new[1] else None,
            values[2] if is_new[2] else None,
        )


class RecordedLoadBook(LoadBook):
    """A LoadBook whose reports are recorded."""

    def __init__(self, recorder: RoutingRecorder) -> None:
        super().__init__(recorder.clock)
        self._recorder = recorder

    def note_report(self, session: ReportingEngine) -> None:
        """Take in the newest report of a session; see LoadBook."""
        recorder = self._recorder
        if not recorder.is_open:
            super().note_report(session)
            return
        states = recorder.states_of([session])
        recorder.clock.begin()
        super().note_report(session)
        recorder.note(Reported(recorder.number_of(session), states, recorder.clock.end()))

    def note_announced(
        self, session: ReportingEngine, num_submitted: int, works: Sequence[SentWork], left: Sequence[SentWork] = ()
    ) -> None:
        """Add and deduct the work of other ingresses' requests; see LoadBook."""
        recorder = self._recorder
        if not recorder.is_open:
            super().note_announced(session, num_submitted, works, left)
            return
        states = recorder.states_of([session])
        recorder.clock.begin()
        super().note_announced(session, num_submitted, works, left)
        number, clock_s = recorder.number_of(session), recorder.clock.end()
        recorder.note(Announced(number, num_submitted, tuple(works), tuple(left), states, clock_s))

    def keep(self, engines: Collection[EngineKey]) -> None:
        """Forget engines that are not among these; see LoadBook."""
        super().keep(engines)
        self._recorder.note(Kept(tuple(engines)))


class RecordedPrefixIndex(PrefixIndex):
    """A PrefixIndex whose reports are recorded. number: in the recording"""

    def __init__(self, recorder: RoutingRecorder, number: int, max_bytes: int) -> None:
        super().__init__(max_bytes, recorder.clock)
        self._recorder = recorder
        self.number = number

    def note_engine(self, engine: EngineKey, num_blocks: int, *, has_states: bool = False) -> None:
        """Note how many blocks an engine has; see PrefixIndex."""
        super().note_engine(engine, num_blocks, has_states=has_states)
        self._note(IndexCall.NOTE_ENGINE, engine, num_blocks=num_blocks, has_states=has_states)

    def forget_engine(self, engine: EngineKey) -> None:
        """Forget what an engine has; see PrefixIndex."""
        super().forget_engine(engine)
        self._note(IndexCall.FORGET_ENGINE, engine)

    def store(self, engine: EngineKey, keys: BlockKeys, positions: npt.NDArray[np.uint32]) -> None:
        """Note that an engine has reported these blocks; see PrefixIndex."""
        super().store(engine, keys, positions)
        self._note(IndexCall.STORE, engine, keys=keys.tobytes(), positions=positions.tobytes())

    def discard(self, engine: EngineKey, keys: BlockKeys) -> None:
        """Note that an engine has these blocks no longer; see PrefixIndex."""
        super().discard(engine, keys)
        self._note(IndexCall.DISCARD, engine, keys=keys.tobytes())

    def begin_snapshot(self, engine: EngineKey) -> None:
        """Begin to take in all blocks of an engine; see PrefixIndex."""
        super().begin_snapshot(engine)
        self._note(IndexCall.BEGIN_SNAPSHOT, engine)

    def end_snapshot(self, engine: EngineKey) -> None:
        """Replace what was known of an engine; see PrefixIndex."""
        super().end_snapshot(engine)
        self._note(IndexCall.END_SNAPSHOT, engine)

    def tidy(self) -> bool:
        """Go on with the removal of what is old; see PrefixIndex. Within another call it is a part of that call."""
        clock = self._recorder.clock
        is_own = self._recorder.is_open and clock.begin()
        is_left = super().tidy()
        if is_own:
            self._recorder.note(IndexTold(self.number, IndexCall.TIDY, None, 0, b"", b"", clock.end()))
        return is_left

    def _note(
        self,
        call: IndexCall,
        engine: EngineKey,
        *,
        num_blocks: int = 0,
        keys: bytes = b"",
        positions: bytes = b"",
        has_states: bool = False,
    ) -> None:
        self._recorder.note(IndexTold(self.number, call, engine, num_blocks, keys, positions, (), has_states))


class RecordedRouter:
    """A Router whose calls are recorded."""

    def __init__(self, recorder: RoutingRecorder, number: int, router: Router) -> None:
        self._recorder = recorder
        self._number = number
        self._router = router
        self._engines: Sequence[EngineLoad] | None = None

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose the engines of a request; see Router."""
        recorder = self._recorder
        if not recorder.is_open:
            return self._router.choose(request, engines)
        states, numbers = recorder.states_of(engines), self._new_numbers(engines)
        told, has_prompt = recorder.request_of(request)
        recorder.clock.begin()
        route: Route[EngineT] | None = None
        try:
            route = self._router.choose(request, engines)
        finally:
            chosen = None if route is None else self._in_numbers(route)
            recorder.note(Chosen(self._number, told, has_prompt, numbers, states, chosen, recorder.clock.end()))
        return route

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Choose other engines for a request that waits; see Router."""
        recorder = self._recorder
        if not recorder.is_open:
            return self._router.reroute(waiting_id, again, engines)
        states, numbers = recorder.states_of(engines), self._new_numbers(engines)
        told, has_prompt = recorder.request_of(again)
        recorder.clock.begin()
        route = self._router.reroute(waiting_id, again, engines)
        chosen, clock_s = None if route is None else self._in_numbers(route), recorder.clock.end()
        recorder.note(Rerouted(self._number, waiting_id, told, has_prompt, numbers, states, chosen, clock_s))
        return route

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Note that the request was submitted; see Router."""
        recorder = self._recorder
        if not recorder.is_open:
            self._router.on_start(request, route)
            return
        states, (told, has_prompt) = recorder.states_of(_engines(route)), recorder.request_of(request)
        recorder.clock.begin()
        self._router.on_start(request, route)
        clock_s = recorder.clock.end()
        decision = None if route.decision is None else value_digest(route.decision)
        in_numbers = self._in_numbers(route)
        recorder.note(Started(self._number, told, has_prompt, in_numbers, states, decision, clock_s))

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Note that the request has ended on this route; see Router."""
        recorder = self._recorder
        if not recorder.is_open:
            self._router.on_end(request, output_token_ids, route)
            return
        states, (told, has_prompt) = recorder.states_of(_engines(route)), recorder.request_of(request)
        recorder.clock.begin()
        self._router.on_end(request, output_token_ids, route)
        in_numbers, output = self._in_numbers(route), list(output_token_ids)
        recorder.note(Over(self._number, told, has_prompt, output, in_numbers, states, recorder.clock.end()))

    def on_leave(self, request_id: str) -> None:
        """Note that the request's engines have it no more; see Router."""
        recorder = self._recorder
        if not recorder.is_open:
            self._router.on_leave(request_id)
            return
        recorder.clock.begin()
        self._router.on_leave(request_id)
        recorder.forget_prompt(request_id)
        recorder.note(Left(self._number, request_id, recorder.clock.end()))

    def _new_numbers(self, engines: Sequence[EngineLoad]) -> tuple[int, ...] | None:
        """Return the numbers of engines to choose from; None if they are those of the last call."""
        if engines is self._engines:
            return None
        self._engines = engines
        return tuple(map(self._recorder.number_of, engines))

    def _in_numbers(self, route: Route[EngineT]) -> SessionRoute:
        number_of = self._recorder.number_of
        prefill = None if route.prefill is None else number_of(route.prefill)
        return SessionRoute(prefill, number_of(route.decode), route.prefix_source, route.reasons is not None)


def _engines(route: Route[EngineT]) -> list[EngineT]:
    return [engine for engine in (route.prefill, route.decode) if engine is not None]
