"""The records of an ingress's recording: every call of its routers, its load book and its prefix indexes, in order.

Engines are sessions, which have numbers. A record has the state of each session that its call may read, as far as the
state has changed since the last record that had it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.requests.request import EngineCoreRequest
from actors.costs.step_cost_model import StepCostModel
from actors.ranks.rank_codec import RankCodec
from actors.recording.engine_events import Clocks
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineDescriptor
from kv_transfer.message_ranges import MAX_ITEMS, Bulk, Count, Incarnation, ShortBytes, TokenIds, Total, WireName
from kv_transfer.params import PrefixSource

VERSION: Final = 3
_Key: TypeAlias = tuple[WireName, Incarnation]
_Numbers: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class RouterHeader:
    """The first record. version: number of the format; hash_key: of the block hashes, which a replay computes again"""

    version: Count
    ingress: WireName
    hash_key: ShortBytes


@dataclass(frozen=True, slots=True)
class IndexMade:
    """A prefix index was made. max_bytes: see PrefixIndex"""

    index: Count
    max_bytes: Total


@dataclass(frozen=True, slots=True)
class RouterMade:
    """A router was made, on one of the indexes."""

    router: Count
    index: Count
    block_size: Count
    mode: RoutingMode
    is_aggregated: bool


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state of a session, as far as routers see it. None: as before"""

    session: Count
    num_unfinished_requests: Total
    num_submitted_requests: Total
    num_prompt_tokens_computed: Total
    descriptor: EngineDescriptor | None = None
    load_report: LoadReport | None = None
    step_costs: StepCostModel | None = None


States: TypeAlias = Annotated[tuple[SessionState, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class Reported:
    """The load book took in the newest report of a session."""

    session: Count
    states: States
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Announced:
    """The load book was told what other ingresses have sent to a session's engine; see LoadBook.note_announced()."""

    session: Count
    num_submitted: Total
    works: Annotated[tuple[SentWork, ...], Meta(max_length=MAX_ITEMS)]
    left: Annotated[tuple[SentWork, ...], Meta(max_length=MAX_ITEMS)]
    states: States
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Kept:
    """The load book forgot all engines but these."""

    engines: Annotated[tuple[_Key, ...], Meta(max_length=MAX_ITEMS)]


class IndexCall(StrEnum):
    """The calls of a prefix index."""

    NOTE_ENGINE = "note_engine"
    FORGET_ENGINE = "forget_engine"
    STORE = "store"
    DISCARD = "discard"
    BEGIN_SNAPSHOT = "begin_snapshot"
    END_SNAPSHOT = "end_snapshot"
    TIDY = "tidy"


@dataclass(frozen=True, slots=True)
class IndexTold:
    """A prefix index was told of an engine's blocks. keys: uint64; positions: uint32, both little-endian

    has_states: see PrefixIndex.note_engine
    """

    index: Count
    call: IndexCall
    engine: _Key | None
    num_blocks: Total
    keys: Bulk
    positions: Bulk
    clock_s: Clocks
    has_states: bool = False


@dataclass(frozen=True, slots=True)
class SessionRoute:
    """A route, in numbers of sessions. has_reasons: whether the router said why"""

    prefill: Count | None
    decode: Count
    prefix_source: PrefixSource | None
    has_reasons: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route was chosen.

    has_prompt: whether the request's prompt is here; if not, it is that of the last record with the request's id
    engines:    the sessions to choose from; None: the same list as at the last choice of this router
    route:      None: there was no engine for the request
    """

    router: Count
    request: EngineCoreRequest
    has_prompt: bool
    engines: _Numbers | None
    states: States
    route: SessionRoute | None
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Rerouted:
    """Other engines were looked for, for a request that waited.

    waiting_id: the id under which it waited; request: as it would be submitted again
    has_prompt, engines: as in Chosen; route: None: it stayed where it was
    """

    router: Count
    waiting_id: WireName
    request: EngineCoreRequest
    has_prompt: bool
    engines: _Numbers | None
    states: States
    route: SessionRoute | None
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Started:
    """A request was submitted. decision: the digest of why its route was chosen; None if the router did not say"""

    router: Count
    request: EngineCoreRequest
    has_prompt: bool
    route: SessionRoute
    states: States
    decision: Annotated[int, Meta(ge=0)] | None
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Over:
    """A request has ended on its route."""

    router: Count
    request: EngineCoreRequest
    has_prompt: bool
    output_token_ids: TokenIds
    route: SessionRoute
    states: States
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Left:
    """The engines of a request have it no more."""

    router: Count
    request_id: WireName
    clock_s: Clocks


RouterEvent: TypeAlias = (
    RouterHeader
    | IndexMade
    | RouterMade
    | Reported
    | Announced
    | Kept
    | IndexTold
    | Chosen
    | Rerouted
    | Started
    | Over
    | Left
)
CODEC: Final = RankCodec(
    (RouterHeader, IndexMade, RouterMade, Reported, Announced, Kept, IndexTold, Chosen, Rerouted, Started, Over, Left)
)
