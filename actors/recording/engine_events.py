"""The records of an engine's recording: its settings, then every call of its scheduler.

A call's record has what the call was told, what the scheduler's clock said meanwhile, and a digest of what was decided.
The records' order is that of the calls, so a record also says before which step something was taken in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from msgspec import Meta

from actors.config import EngineRoleName
from actors.core.outputs.model_runner_output import DraftTokenIds
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.request_status import RequestStatus
from actors.costs.step_cost_model import StepCostModel
from actors.ranks.rank_codec import RankCodec
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.message_ranges import MAX_ITEMS, Clock, Count, LongText, ShortBytes, Total, WireName, Word

VERSION: Final = 1
Clocks: TypeAlias = Annotated[tuple[Clock, ...], Meta(max_length=MAX_ITEMS)]
Digest: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHeader:
    """The first record: all arguments that the engine's scheduler was made with.

    version:     number of the format
    scheduler, cache, kv_transfer: the engine's settings, as JSON
    abilities:   the abilities of the engine's worker
    fetch_name:  what the names of the engine's fetches from other engines begin with
    max_fetches: the most of these fetches at once
    hash_key:    the key of the block hashes, so that a replay computes the same ones
    num_state_blocks: blocks of a request's recurrent state
    """

    version: Count
    engine_id: WireName
    incarnation: Total
    scheduler: dict[str, Any]
    cache: dict[str, Any]
    kv_transfer: dict[str, Any]
    num_blocks: Count
    max_model_len: Count
    vocab_size: Count
    kv_bytes_per_token: Total
    abilities: Annotated[tuple[Word, ...], Meta(max_length=64)]
    fetch_name: WireName
    max_fetches: Count
    hash_key: ShortBytes
    num_state_blocks: Count = 0


@dataclass(frozen=True, slots=True)
class Aimed:
    """A change, from the next step on, of what the sizes of chunks depend on: both aims, role and cost model."""

    itl_s: float | None
    role: EngineRoleName
    model: StepCostModel | None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """A request was taken in. arrived_s: by the engine's clock; is_duplicate: the scheduler refused its id"""

    request: EngineCoreRequest
    client_index: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    arrived_s: Clock
    is_duplicate: bool
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests were ended from outside: aborted, or by the engine itself. status: the status's name"""

    request_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    status: Word
    error: LongText | None
    clock_s: Clocks

    @property
    def finished_status(self) -> RequestStatus:
        """The status. Raises KeyError for a name that no status has."""
        return RequestStatus[self.status]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step was decided. num_requests, num_tokens: what it computes; digest: the parts of STEP_PARTS"""

    num_requests: Count
    num_tokens: Count
    digest: Digest
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a step that a worker has returned, as far as the scheduler decides by them.

    token_ids:      [num_requests, most tokens of a request] int64
    pooled_req_ids: requests that got their vector, which is left out; so are log-probabilities
    transfers:      the reports of transfers, without counters
    """

    req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    token_ids: np.ndarray
    pooled_req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    num_nans_in_logits: dict[WireName, Count] = field(default_factory=dict)
    draft_token_ids: DraftTokenIds | None = None
    transfers: KVConnectorOutput | None = None


@dataclass(frozen=True, slots=True)
class TakenIn:
    """A step's results were taken in.

    step:   the number of the step's Scheduled record, from 0
    digest: the parts of OUTPUT_PARTS; empty if the scheduler raised an error
    error:  that error, after which the recording ends
    """

    step: Total
    results: StepResults
    digest: Digest
    error: LongText | None
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Reset:
    """The prefix cache was reset, or the reset was refused."""

    reset_running_requests: bool
    is_done: bool
    clock_s: Clocks


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The last record: what happens next cannot be recorded."""

    reason: LongText


EngineEvent: TypeAlias = EngineHeader | Aimed | Added | Ended | Scheduled | TakenIn | Reset | Unrecorded
CODEC: Final = RankCodec((EngineHeader, Aimed, Added, Ended, Scheduled, TakenIn, Reset, Unrecorded))
