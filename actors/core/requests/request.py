"""A request inside an engine: as it is submitted, and as the scheduler keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from actors.core.requests.adapter import Adapter
from actors.core.requests.block_hash import BlockHash, BlockHasher, ExtraKeys
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature
from actors.core.requests.request_status import TRANSITIONS
from actors.core.requests.request_status import FinishReason as FinishReason
from actors.core.requests.request_status import RequestStatus as RequestStatus
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.errors import IllegalTransition
from kv_transfer.message_ranges import (
    Bulk,
    Clock,
    Count,
    Name,
    PositiveCount,
    Priority,
    Sentence,
    ShortBytes,
    TokenId,
    TokenIds,
    Word,
)
from kv_transfer.params import EngineAddress, KVTransferParams, PrefixSource, TransferRole
from kv_transfer.transfer_stats import TransferTimings

if TYPE_CHECKING:
    from actors.core.requests.running_rows import RunningRows


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embeddings in place of a prompt's tokens.

    data:   [num_tokens, hidden_size] of dtype, row by row
    digest: of data, names them in the prefix cache
    """

    data: Bulk
    num_tokens: PositiveCount
    hidden_size: PositiveCount
    dtype: Word
    digest: ShortBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request as it is submitted to an engine, over the wire or in process (msgspec encodes it).

    attempt:          new each time the request is submitted again
    prompt_token_ids: at least one token; as many zeros as prompt_embeds has rows, if there are any
    mm_features:      the prompt's multimodal items, in order
    encoder_inputs:   what to make their embeddings of; an engine that is given none can only take what it has, or what
                      comes from others
    encoder:          an engine that makes their embeddings, in place of the one that prefills
    pooling_params:   a vector is wanted, no tokens
    output_token_ids: tokens that it already has (resume); the engine goes on at the next position
    eos_token_ids:    the model's end-of-sequence tokens
    arrival_time_s:   monotonic clock of the process that has it now, at its arrival at the cluster; orders the priority
                      queue (a session gives it the receiver's clock, session_messages.Submit)
    deadline_s:       by the same clock: nobody wants the answer after it; or None
    tenant:           who shares fairly with others what the engine serves
    lora:             the adapter that it runs with
    cache_salt:       separates the prefix cache between those who must not see each other's hits
    prefix_source:    where more of its prefix is cached than here, perhaps
    """

    request_id: Name
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    attempt: Count = 0
    output_token_ids: TokenIds = field(default_factory=list)
    eos_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    priority: Priority = 0
    arrival_time_s: Clock = 0.0
    deadline_s: Clock | None = None
    cache_salt: Sentence | None = None
    tenant: Sentence = ""
    lora: Adapter | None = None
    prompt_embeds: PromptEmbeds | None = None
    mm_features: Annotated[tuple[MultiModalFeature, ...], Meta(max_length=65_536)] = ()
    encoder_inputs: Annotated[tuple[EncoderInput, ...], Meta(max_length=65_536)] = ()
    encoder: EngineAddress | None = None
    pooling_params: PoolingParams | None = None
    kv_transfer_params: KVTransferParams | None = None
    prefix_source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A request entered a status. at_s: the engine's monotonic clock; Unix time once it has left the engine."""

    status: RequestStatus
    at_s: Clock


class Request:
    """A request in the scheduler. Only the scheduler and its parts change it.

    Invariants:
    - all_token_ids is the prompt and the output; tokens are only ever appended, to this very list
    - status changes only through set_status, only along the arrows of docs/states.md
    - block_hashes names the first full blocks of all_token_ids, all of them after extend_block_hashes()
    - num_computed_tokens counts what the steps scheduled so far compute, those under way included; while the request
      is running it lives in its row
    """

    __slots__ = (
        "_hasher",
        "_num_computed_tokens",
        "_prompt_tail_name",
        "_rows",
        "all_token_ids",
        "arrival_time",
        "attempt",
        "block_hashes",
        "cache_salt",
        "client_index",
        "deadline_s",
        "encoder_inputs",
        "eos_token_ids",
        "first_token_at_s",
        "is_corrupted",
        "is_known_to_worker",
        "kv_transfer_params",
        "lora",
        "lora_name",
        "max_num_tokens",
        "mm_features",
        "num_cached_tokens",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_prompt_tokens_computed",
        "pooling_params",
        "prefix_source",
        "priority",
        "prompt_embeds",
        "prompt_token_ids",
        "queue_position",
        "request_id",
        "row",
        "sampling_params",
        "scheduled_at_s",
        "spec_token_ids",
        "status",
        "status_changes",
        "stop_token_ids",
        "tenant",
        "transfer_role",
        "transfer_timings",
    )

    def __init__(
        self, core_request: EngineCoreRequest, client_index: int, hasher: BlockHasher | None, now_s: float
    ) -> None:
        self.request_id = core_request.request_id
        self.client_index = client_index
        self.attempt = core_request.attempt
        self.priority = core_request.priority
        self.arrival_time = core_request.arrival_time_s
        self.deadline_s = core_request.deadline_s
        self.sampling_params = core_request.sampling_params
        self.eos_token_ids = core_request.eos_token_ids
        self.cache_salt = core_request.cache_salt
        self.mm_features = core_request.mm_features
        self.encoder_inputs = core_request.encoder_inputs
        self.tenant = core_request.tenant
        self.lora = core_request.lora
        self.lora_name = None if core_request.lora is None else core_request.lora.key
        self.prompt_embeds = core_request.prompt_embeds
        self.pooling_params = core_request.pooling_params
        self.kv_transfer_params = core_request.kv_transfer_params
        self.prefix_source = core_request.prefix_source
        ticket = core_request.kv_transfer_params
        self.transfer_role: TransferRole | None = None if ticket is None else ticket.role
        """Its part in a handoff that is still to come: None once a consumer's load is over, however it ended."""

        self.prompt_token_ids = core_request.prompt_token_ids
        self.all_token_ids = self.prompt_token_ids + core_request.output_token_ids
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.spec_token_ids: list[int] = []
        params = core_request.sampling_params
        # A pooling request is over before it has any token.
        self.max_num_tokens = self.num_prompt_tokens + (1 if self.pooling_params else params.max_tokens)
        """Prompt and output tokens that it may have in the end; the scheduler caps it by max_model_len."""
        self.stop_token_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids))
        self.block_hashes: list[BlockHash] = []
        self._hasher = hasher
        self._prompt_tail_name: BlockHash | None = None
        self.extend_block_hashes()

        self._rows: RunningRows | None = None
        self.row = -1
        self.queue_position: tuple[float, ...] = ()
        self._num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_passed = 0
        """How many requests have got blocks while its load was set aside."""
        self.num_prompt_tokens_computed = 0
        self.is_known_to_worker = False
        self.is_corrupted = False
        self.status = RequestStatus.WAITING
        self.status_changes = [StatusChange(RequestStatus.WAITING, now_s)]
        self.scheduled_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.transfer_timings: TransferTimings | None = None

    @classmethod
    def from_engine_core_request(
        cls,
        core_request: EngineCoreRequest,
        client_index: int = 0,
        hasher: BlockHasher | None = None,
        *,
        now_s: float = 0.0,
    ) -> Request:
        """Make the engine's own request from a submitted one.

        hasher: of the engine's KV cache; without it the request takes no part in prefix caching
        now_s:  the engine's clock at its arrival there
        """
        return cls(core_request, client_index, hasher, now_s)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those that it came with included."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def computes_prompt_only(self) -> bool:
        """Whether it is over here with its prompt: it needs no slot for a token that follows."""
        return self.transfer_role is TransferRole.PRODUCER or self.pooling_params is not None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in place, or will be once the steps under way are over."""
        return self._num_computed_tokens if self._rows is None else int(self._rows.num_computed[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        if self._rows is None:
            self._num_computed_tokens = num_tokens
        else:
            self._rows.num_computed[self.row] = num_tokens

    def enter_row(self, rows: RunningRows, row: int) -> None:
        """The request runs from now on."""
        self._rows, self.row = rows, row

    def leave_row(self) -> None:
        """The request runs no longer."""
        self._num_computed_tokens = self.num_computed_tokens
        self._rows, self.row = None, -1

    @property
    def is_plain(self) -> bool:
        """Whether its decode steps need no look at the request itself: its next token is all that comes of them."""
        params = self.sampling_params
        is_looked_at = params.logprobs is not None or params.structured_output or params.repetition_max_pattern
        return self.transfer_role is not TransferRole.PRODUCER and not is_looked_at and self.pooling_params is None

    @property
    def may_run_ahead(self) -> bool:
        """Whether its next token can be computed before its last one is known here.

        A producer ends with its first token, a pooling request has none, and a grammar has to see each of them.
        """
        ends_here = self.transfer_role is TransferRole.PRODUCER or self.pooling_params is not None
        return not ends_here and self.sampling_params.structured_output is None

    @property
    def may_draft(self) -> bool:
        """Whether its next tokens may be guessed.

        Not where this engine does not generate, and not where the prompt's tokens stand for something else: as guesses
        they would ask for what is not there.
        """
        ends_here = self.transfer_role is TransferRole.PRODUCER or self.pooling_params is not None
        return not ends_here and self.prompt_embeds is None and not self.mm_features

    def lacks_encoder_inputs(self, num_computed_tokens: int) -> bool:
        """Whether its tokens from there on show items that this engine was not given anything to encode of.

        So it is with a decode engine: it gets an image's KV, and has lost it if it loses the request's blocks.
        """
        if not self.mm_features or self.encoder_inputs:
            return False
        return self.mm_features[-1].end > num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are still to come: they come with the first token."""
        return self.sampling_params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it is content with cached KV: not if something is wanted of every prompt token.

        A consumer is: what is wanted comes from its producer.
        """
        wants_last = self.pooling_params is None or self.pooling_params.pooling == "last"
        return wants_last and (not self.wants_prompt_logprobs or self.transfer_role is TransferRole.CONSUMER)

    @property
    def max_tokens(self) -> int:
        """How many output tokens its client wants at most."""
        return self.sampling_params.max_tokens

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append sampled tokens."""
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
        else:
            self.all_token_ids.extend(token_ids)

    def extend_block_hashes(self) -> None:
        """Name every full block of all_token_ids that has no hash yet."""
        hasher = self._hasher
        if hasher is not None and len(self.all_token_ids) >= (len(self.block_hashes) + 1) * hasher.block_size:
            hasher.extend(self.block_hashes, self.all_token_ids, self._extra_keys())

    def content_hash(self) -> BlockHash:
        """Name everything that the KV of all_token_ids depends on, whatever the block size."""
        assert self._hasher is not None, "a request with a ticket takes part in prefix caching"
        return self._hasher.name_all(self.all_token_ids, self._extra_keys())

    def prompt_tail_name(self) -> BlockHash | None:
        """Name what the prompt has after its last full block; None if it has nothing there."""
        if self._prompt_tail_name is None and self._hasher is not None:
            self._prompt_tail_name = self._hasher.name_tail(
                self.block_hashes, self.prompt_token_ids, self._extra_keys()
            )
        return self._prompt_tail_name

    def _extra_keys(self) -> ExtraKeys:
        digest = None if self.prompt_embeds is None else self.prompt_embeds.digest
        return ExtraKeys(self.cache_salt, self.lora_name, self.mm_features, digest)

    def set_status(self, status: RequestStatus, now_s: float) -> None:
        """Enter a status. Raises IllegalTransition if no arrow leads there."""
        if status not in TRANSITIONS.get(self.status, ()):
            raise IllegalTransition(f"{self.request_id}: {self.status.name} -> {status.name}")
        self.status = status
        self.status_changes.append(StatusChange(status, now_s))

    def is_finished(self) -> bool:
        """Whether it has ended here."""
        return self.status.is_finished
