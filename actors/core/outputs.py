"""What the scheduler, the model runner and the engine's clients tell each other in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import numpy as np
from msgspec import Meta

from actors.core.blocks.prompt_tails import BlockCopy
from actors.core.requests.adapter import AdapterCommands
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature
from actors.core.requests.request import PromptEmbeds
from actors.core.requests.request import StatusChange as StatusChange
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.core.requests.status import FinishReason
from actors.core.stats import SchedulerStats
from kv_transfer.connector.reports import FinishedReceiving, FinishedSending, KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.ranges import (
    MAX_COUNT,
    MAX_ITEMS,
    MAX_KINDS,
    AnyFloat,
    Clock,
    Count,
    LongText,
    RequestIds,
    TokenId,
    TokenIds,
    Total,
    WireName,
    Word,
)
from kv_transfer.transfer_stats import TransferTimings

NO_TOKEN: Final = -1
GroupBlockIds: TypeAlias = Annotated[
    tuple[Annotated[list[Count], Meta(max_length=MAX_ITEMS)], ...], Meta(max_length=MAX_KINDS)
]
"""Blocks by KV cache group."""
_Drafts: TypeAlias = Annotated[list[Annotated[int, Meta(ge=NO_TOKEN, le=MAX_COUNT)]], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that the worker has not seen, or has forgotten: everything that it needs.

    row: of the persistent batch
    output_token_ids: tokens sampled elsewhere (a resumed or handed-over request)
    block_ids: one list per KV cache group; there is one group today
    """

    req_id: WireName
    row: Count
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    sampling_params: SamplingParams
    eos_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ITEMS)]
    block_ids: GroupBlockIds
    num_computed_tokens: Count
    pooling_params: PoolingParams | None = None
    lora_name: WireName | None = None
    prompt_embeds: PromptEmbeds | None = None
    mm_features: Annotated[tuple[MultiModalFeature, ...], Meta(max_length=MAX_ITEMS)] = ()
    encoder_inputs: Annotated[tuple[EncoderInput, ...], Meta(max_length=MAX_ITEMS)] = ()


@dataclass(frozen=True, slots=True)
class ResumedRequestData:
    """A request that the worker knows and that lost its row and its blocks.

    num_tokens: so many of its tokens count; what a step under way sampled after them is void
    block_ids: all of them
    """

    req_id: WireName
    row: Count
    num_tokens: Count
    block_ids: GroupBlockIds


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the worker knows: only what changed. The lists are parallel.

    resumed_from_preemption: new_block_ids replace the request's blocks instead of being appended
    new_token_ids: output tokens that the worker did not sample itself (empty lists today: it sampled them all)
    num_output_tokens: as the worker has them when it comes to this step
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


NOTHING_GROWN: Final = np.zeros((3, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A step's requests in batch order, as arrays [num_requests] of int64.

    rows:    of the persistent batch; epochs says whose they are: a number that is new each time a row is given
    num_plain: so many from the start decode one token each, and nothing about them needs a look at the request
    num_new_tokens: tokens to compute, drafts included
    num_computed_tokens, num_output_tokens: before this step
    grown: [3, num_new_blocks] blocks that rows get in addition: their rows, places in the block tables, and ids
    """

    req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    rows: np.ndarray
    epochs: np.ndarray
    num_plain: Count
    num_new_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    num_output_tokens: np.ndarray
    grown: np.ndarray

    def __len__(self) -> int:
        return len(self.req_ids)

    @classmethod
    def empty(cls) -> StepBatch:
        """A step without requests."""
        none = np.zeros(0, dtype=np.int64)
        return cls([], none, none, 0, none, none, none, NOTHING_GROWN)


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which requests compute how many tokens, in which blocks.

    The worker reads batch, scheduled_new_reqs and scheduled_resumed_reqs. num_scheduled_tokens and
    scheduled_cached_reqs say the same request by request; they are made when they are asked for.

    step_index: 1, 2, 3 … counts the steps that compute; 0 for one that does not
    block_copies: to be done before anything is written; no block is the source of one and the destination of another
    finished_req_ids: requests that ended since the last step, known to the worker or not: it forgets them before it
        looks at anything else, since an id may come back at once
    preempted_req_ids: requests that lost their blocks in this step
    scheduled_spec_decode_tokens: drafts that this step verifies, by request id
    num_drafts_wanted: [num_requests] int64, how many tokens to draft for each request after this step, in batch order;
        None: for nobody
    scheduled_encoder_inputs: items to encode before the forward, by request id
    free_encoder_input_ids: items whose request is past them, as (request id, input id)
    free_encoder_mm_hashes: encoder outputs to forget
    structured_output_request_ids: requests that need a grammar's mask, with their places in the batch
    grammar_bitmask: [num_rows, ceil(vocab_size / 32)] int32, 1 for allowed tokens; a row for each of
        structured_output_request_ids, followed by one for each of its drafts; filled in
        between schedule() and the forward
    adapter_commands: what to load and to drop, beside this step
    """

    batch: StepBatch
    scheduled_new_reqs: Annotated[list[NewRequestData], Meta(max_length=MAX_ITEMS)]
    finished_req_ids: RequestIds
    scheduled_resumed_reqs: Annotated[list[ResumedRequestData], Meta(max_length=MAX_ITEMS)] = field(
        default_factory=list
    )
    total_num_scheduled_tokens: Count = 0
    step_index: Total = 0
    block_copies: Annotated[list[BlockCopy], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    preempted_req_ids: RequestIds = field(default_factory=set)
    scheduled_spec_decode_tokens: Annotated[dict[WireName, _Drafts], Meta(max_length=MAX_ITEMS)] = field(
        default_factory=dict
    )
    num_drafts_wanted: np.ndarray | None = None
    scheduled_encoder_inputs: Annotated[
        dict[WireName, Annotated[list[Count], Meta(max_length=MAX_ITEMS)]], Meta(max_length=MAX_ITEMS)
    ] = field(default_factory=dict)
    num_common_prefix_blocks: Annotated[list[Count], Meta(max_length=MAX_KINDS)] = field(default_factory=lambda: [0])
    free_encoder_input_ids: Annotated[list[tuple[WireName, Count]], Meta(max_length=MAX_ITEMS)] = field(
        default_factory=list
    )
    free_encoder_mm_hashes: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    structured_output_request_ids: Annotated[dict[WireName, Count], Meta(max_length=MAX_ITEMS)] = field(
        default_factory=dict
    )
    grammar_bitmask: np.ndarray | None = None
    adapter_commands: AdapterCommands | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None

    def is_empty(self) -> bool:
        """Whether the worker has nothing to do, not even to forget or to transfer."""
        no_transfer = self.kv_connector_metadata is None or self.kv_connector_metadata.is_empty()
        is_forgetful = self.finished_req_ids or self.preempted_req_ids or self.free_encoder_mm_hashes
        is_same = self.adapter_commands is None
        return self.total_num_scheduled_tokens == 0 and not is_forgetful and no_transfer and is_same

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Tokens to compute, by request id, in batch order."""
        return dict(zip(self.batch.req_ids, self.batch.num_new_tokens.tolist(), strict=True))

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        """The requests of this step that the worker knows."""
        batch = self.batch
        grown: dict[int, list[int]] = {}
        for row, block_id in batch.grown[::2].T.tolist():
            grown.setdefault(row, []).append(block_id)
        new = {request.req_id for request in self.scheduled_new_reqs}
        resumed = {request.req_id: request for request in self.scheduled_resumed_reqs}
        known = [index for index, req_id in enumerate(batch.req_ids) if req_id not in new]
        req_ids = [batch.req_ids[index] for index in known]
        return CachedRequestData(
            req_ids=req_ids,
            resumed_from_preemption=[req_id in resumed for req_id in req_ids],
            new_token_ids=[[] for _ in known],
            new_block_ids=[
                resumed[req_id].block_ids if req_id in resumed else (grown.get(int(batch.rows[index]), []),)
                for index, req_id in zip(known, req_ids, strict=True)
            ],
            num_computed_tokens=batch.num_computed_tokens[known].tolist(),
            num_output_tokens=batch.num_output_tokens[known].tolist(),
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the distribution before temperature and filters.

    token_ids[0], logprobs[0]: the sampled token; the top ones follow, best first
    rank: the sampled token's rank, 1 is the most likely
    """

    token_ids: Annotated[list[Annotated[int, Meta(ge=NO_TOKEN, le=MAX_COUNT)]], Meta(max_length=MAX_ITEMS)]
    logprobs: Annotated[list[AnyFloat], Meta(max_length=MAX_ITEMS)]
    rank: Count


class ModelRunnerOutput:
    """What a step computed.

    token_ids: [len(req_ids), most tokens of a request] int64, the sampled tokens of each request, filled up with
        NO_TOKEN; a request whose prompt is not through yet has none
    logprobs: for each request that asked, one entry per sampled token
    num_nans_in_logits: by request id, only those that have any
    pooler_output: for each pooling request whose prompt is through, its vector
    prompt_logprobs_dict: for each request that asked and whose prompt is through, one entry per prompt token but the
        first
    draft_token_ids: what a drafter proposes for the next step
    adapter_loads: what has become of loads, by the adapter's key: None, or why it has failed
    """

    __slots__ = (
        "adapter_loads",
        "draft_token_ids",
        "kv_connector_output",
        "logprobs",
        "num_nans_in_logits",
        "pooler_output",
        "prompt_logprobs_dict",
        "req_ids",
        "token_ids",
    )

    def __init__(
        self,
        req_ids: list[str],
        sampled_token_ids: Sequence[Sequence[int]] | np.ndarray,
        *,
        logprobs: dict[str, list[TokenLogprobs]] | None = None,
        num_nans_in_logits: dict[str, int] | None = None,
        pooler_output: dict[str, list[float]] | None = None,
        prompt_logprobs_dict: dict[str, list[TokenLogprobs]] | None = None,
        draft_token_ids: DraftTokenIds | None = None,
        kv_connector_output: KVConnectorOutput | None = None,
    ) -> None:
        """sampled_token_ids: parallel to req_ids, as lists or as token_ids has it."""
        self.req_ids = req_ids
        self.token_ids = sampled_token_ids if isinstance(sampled_token_ids, np.ndarray) else _pad(sampled_token_ids)
        self.logprobs = logprobs or {}
        self.num_nans_in_logits = num_nans_in_logits or {}
        self.pooler_output = pooler_output or {}
        self.prompt_logprobs_dict = prompt_logprobs_dict or {}
        self.draft_token_ids = draft_token_ids
        self.kv_connector_output = kv_connector_output
        self.adapter_loads: dict[str, str | None] = {}

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """The place of each request."""
        return {req_id: index for index, req_id in enumerate(self.req_ids)}

    @property
    def sampled_token_ids(self) -> list[list[int]]:
        """The sampled tokens, parallel to req_ids; empty where the prompt is not through yet."""
        return [[token_id for token_id in row if token_id != NO_TOKEN] for row in self.token_ids.tolist()]

    def token_ids_of(self, req_ids: list[str]) -> np.ndarray:
        """Return token_ids in the order of req_ids; a request that the step did not have has no tokens."""
        if self.req_ids == req_ids:
            return self.token_ids
        index_of = self.req_id_to_index
        none = np.full((1, self.token_ids.shape[1]), NO_TOKEN, dtype=np.int64)
        return np.concatenate([self.token_ids, none])[[index_of.get(req_id, -1) for req_id in req_ids]]

    @property
    def finished_sending(self) -> set[str]:
        """Requests whose blocks have left this engine."""
        reports = self.kv_connector_output.reports if self.kv_connector_output else ()
        return {report.key.name for report in reports if isinstance(report, FinishedSending)}

    @property
    def finished_recving(self) -> set[str]:
        """Requests whose blocks have arrived in this engine, or never will."""
        reports = self.kv_connector_output.reports if self.kv_connector_output else ()
        return {report.key.name for report in reports if isinstance(report, FinishedReceiving)}


def _pad(token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    padded = np.full((len(token_ids), max(map(len, token_ids), default=0) or 1), NO_TOKEN, dtype=np.int64)
    for row, tokens in zip(padded, token_ids, strict=True):
        row[: len(tokens)] = tokens
    return padded


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Tokens that a drafter proposes to go on with; the lists are parallel."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """One request's life in one engine, sent with its last output.

    queued_s:  from its arrival at the engine until it was first scheduled or its blocks were reserved
    prefill_s: from then until its first token was sampled here; 0 if none was
    num_prompt_tokens_computed: prompt tokens whose KV this engine computed itself
    num_cached_tokens: prompt tokens that came from this engine's prefix cache
    num_fetched_images: those of the request whose embeddings came from an encode engine
    """

    queued_s: Clock
    prefill_s: Clock
    num_prompt_tokens_computed: Total
    num_cached_tokens: Total
    num_preemptions: Total
    status_changes: Annotated[list[StatusChange], Meta(max_length=MAX_ITEMS)]
    transfer: TransferTimings | None = None
    num_fetched_images: Count = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request has lost its blocks to others and waits; it goes on by itself, unless its client has a better place.

    num_computed_tokens: so many tokens from the start had their KV here; it stays cached until its blocks are reused
    num_wait_steps: how many steps until there is room for it again, if those that run go on to their full length
    """

    num_computed_tokens: Count
    num_wait_steps: Total


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """What one step gave one request.

    attempt:        of the request as it was submitted
    first_position: output position of new_token_ids[0], counted over the request's whole life
    handed_over:    this engine is done with the request, whose consumer goes on; finish_reason is None then
    stop_token_id:  the EOS or stop token that ended it
    stop_reason:    why it stopped, if neither EOS nor a stop token did ("repetition")
    error:          why, if finish_reason is ERROR (or ABORT by the engine's own decision)
    is_requests_fault: any engine would say the same of this request
    is_adapters_fault: any engine would say the same of its adapter
    is_stranded:    this engine lacks what the request needs to start over: submitted anew, it goes on
    pooling_output: a pooling request's vector
    prompt_logprobs: with the first token, if they were asked for
    preemption:     instead of tokens
    """

    request_id: WireName
    attempt: Count
    new_token_ids: TokenIds
    first_position: Count
    finish_reason: FinishReason | None = None
    handed_over: bool = False
    stop_token_id: TokenId | None = None
    stop_reason: Word | None = None
    error: LongText | None = None
    is_requests_fault: bool = False
    is_adapters_fault: bool = False
    is_stranded: bool = False
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_ITEMS)] | None = None
    pooling_output: Annotated[list[AnyFloat], Meta(max_length=MAX_ITEMS)] | None = None
    prompt_logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_ITEMS)] | None = None
    preemption: Preemption | None = None
    timings: RequestTimings | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last that this engine says about the request."""
        return self.finish_reason is not None or self.handed_over


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """Requests that got one token each and go on: the lists are parallel."""

    req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    attempts: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    first_positions: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    token_ids: TokenIds

    def __post_init__(self) -> None:
        """Raise ValueError for lists that are not parallel: they may come from another process."""
        if not len(self.req_ids) == len(self.attempts) == len(self.first_positions) == len(self.token_ids):
            raise ValueError("the columns of decoded tokens are not equally long")

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        """Iterate over them one by one."""
        for req_id, attempt, position, token_id in zip(
            self.req_ids, self.attempts, self.first_positions, self.token_ids, strict=True
        ):
            yield EngineCoreOutput(
                request_id=req_id, attempt=attempt, new_token_ids=[token_id], first_position=position
            )


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything that one step has for one client: one message.

    decoded: what most requests get in most steps, in columns
    others:  the outputs of all other requests
    """

    others: Annotated[list[EngineCoreOutput], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    finished_req_ids: Annotated[set[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=set)
    scheduler_stats: SchedulerStats | None = None
    decoded: DecodedTokens | None = None

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """All outputs, one per request."""
        return [*(self.decoded or ()), *self.others]
