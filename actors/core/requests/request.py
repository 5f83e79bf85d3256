"""A request in an engine: the message that submits it, and the object that the scheduler keeps."""

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
from actors.core.requests.slo import Slo
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
    """Embeddings that a client gives in place of a prompt's tokens.

    data:   [num_tokens, hidden_size] of dtype, in C order
    digest: a digest of data, which identifies the embeddings in the prefix cache
    """

    data: Bulk
    num_tokens: PositiveCount
    hidden_size: PositiveCount
    dtype: Word
    digest: ShortBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """The message that submits a request to an engine, from another process (encoded by msgspec) or within one.

    attempt:          a number that is new each time the request is submitted
    prompt_token_ids: at least one token; with prompt_embeds, one zero for each row of prompt_embeds
    mm_features:      the prompt's images, in order
    encoder_inputs:   the inputs from which the encoder computes the images' embeddings; without them, the engine can
                      only use embeddings or KV that it has, or that another engine sends
    encoder:          an encode engine that computes the images' embeddings for this one
    pooling_params:   set if the request asks for a vector or for scores instead of tokens
    output_token_ids: tokens that were generated before (the request is resumed); the engine goes on after them
    eos_token_ids:    the model's end-of-sequence tokens
    arrival_time_s:   when the request arrived at the cluster, by the monotonic clock of the process that has the
                      request now (session_messages.Submit converts it); orders the priority queue
    deadline_s:       the time, by the same clock, after which the client does not want the answer; or None
    tenant:           the tenant that the request belongs to; tenants share the engine fairly
    lora:             the adapter to run with
    cache_salt:       keeps apart, in the prefix cache, clients that must not see each other's hits
    prefix_source:    an engine that may have more of the request's prefix in its cache than this one
    slo:              the request's service-level aims, for the router; the scheduler does not look at them
    traceparent:      the trace context of the request, as a W3C header, for a connector that makes spans of its own
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
    slo: Slo | None = None
    traceparent: Word | None = None


@dataclass(frozen=True, slots=True)
class StatusChange:
    """The event that a request entered a status.

    at_s: seconds by the engine's monotonic clock; once the event has left the engine, Unix time
    """

    status: RequestStatus
    at_s: Clock


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """A request's wait for a prefix that is on its way to its engine for another request (loads/arriving_prefixes.py).

    load_id:   the other request
    compute_s: the seconds in which this engine would compute the prefix
    since_s:   when the request waited for one first, by the engine's clock
    """

    load_id: str
    compute_s: float
    since_s: float


class Request:
    """A request in the scheduler. Only the scheduler and its parts change it.

    Invariants:
    - all_token_ids is the prompt and the output; tokens are only appended to it, and the list is never replaced
    - status changes only through set_status(), and only along the arrows of docs/states.md
    - block_hashes has the hashes of the first full blocks of all_token_ids; after extend_block_hashes(), of all of them
    - num_computed_tokens counts the tokens of all steps scheduled so far, including steps under way; while the request
      is running, the number is kept in the request's row
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
        "prefix_wait",
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
        "traceparent",
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
        self.traceparent = core_request.traceparent
        ticket = core_request.kv_transfer_params
        self.transfer_role: TransferRole | None = None if ticket is None else ticket.role
        """The request's part in its handoff; None once a consumer's load is over, however the load ended."""

        self.prompt_token_ids = core_request.prompt_token_ids
        self.all_token_ids = self.prompt_token_ids + core_request.output_token_ids
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.spec_token_ids: list[int] = []
        params = core_request.sampling_params
        # A pooling request ends before it has any output token.
        self.max_num_tokens = self.num_prompt_tokens + (1 if self.pooling_params else params.max_tokens)
        """The most tokens, prompt and output, that the request may have; the scheduler caps it at max_model_len."""
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
        """How many requests have got blocks while this request's load was set aside."""
        self.prefix_wait: PrefixWait | None = None
        """Its wait for a prefix that is, or was, on its way here for another request."""
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
        """Make the scheduler's object from the message that submitted a request.

        hasher: hashes blocks for the engine's KV cache; without one the request takes no part in prefix caching
        now_s:  the engine's clock when the request arrived at the engine
        """
        return cls(core_request, client_index, hasher, now_s)

    @property
    def num_tokens(self) -> int:
        """How many tokens the request has so far, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """How many output tokens the request has so far, including those that it came with."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def computes_prompt_only(self) -> bool:
        """Whether the request ends here once its prompt is computed, so that it needs no slot for a further token."""
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
        """Note that the request runs from now on, in this row."""
        self._rows, self.row = rows, row

    def leave_row(self) -> None:
        """Note that the request does not run any more."""
        self._num_computed_tokens = self.num_computed_tokens
        self._rows, self.row = None, -1

    @property
    def is_plain(self) -> bool:
        """Whether a decode step changes nothing for the request but its next token, so RunningRows can handle it."""
        params = self.sampling_params
        is_looked_at = params.logprobs is not None or params.structured_output or params.repetition_max_pattern
        return self.transfer_role is not TransferRole.PRODUCER and not is_looked_at and self.pooling_params is None

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step can be scheduled before the scheduler knows the token of the last one.

        It cannot for a producer, which ends with its first token; for a pooling request, which has no token; and for a
        request with a grammar, which has to match each token first.
        """
        ends_here = self.transfer_role is TransferRole.PRODUCER or self.pooling_params is not None
        return not ends_here and self.sampling_params.structured_output is None

    @property
    def may_draft(self) -> bool:
        """Whether the request may have draft tokens (speculative decoding).

        It may not if this engine does not generate its tokens, and not if tokens of the prompt are placeholders: a
        draft token that is a placeholder would stand for an image or an embedding that does not exist.
        """
        ends_here = self.transfer_role is TransferRole.PRODUCER or self.pooling_params is not None
        return not ends_here and self.prompt_embeds is None and not self.mm_features

    def lacks_encoder_inputs(self, num_computed_tokens: int) -> bool:
        """Whether the tokens from num_computed_tokens on include images for which this engine has no encoder inputs.

        A decode engine has none: it gets the KV of images from its producer, and cannot compute it again.
        """
        if not self.mm_features or self.encoder_inputs:
            return False
        return self.mm_features[-1].end > num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are still due; they are sent with the first token."""
        return self.sampling_params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may use cached KV for its prompt.

        It may not if it needs a result for every prompt token, such as a log-probability. A consumer may in any case,
        since its producer computes these results.
        """
        wants_last = self.pooling_params is None or self.pooling_params.pooling == "last"
        return wants_last and (not self.wants_prompt_logprobs or self.transfer_role is TransferRole.CONSUMER)

    @property
    def max_tokens(self) -> int:
        """The most output tokens that the client wants."""
        return self.sampling_params.max_tokens

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append sampled tokens."""
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
        else:
            self.all_token_ids.extend(token_ids)

    def extend_block_hashes(self) -> None:
        """Compute the hash of every full block of all_token_ids that has none yet."""
        hasher = self._hasher
        if hasher is not None and len(self.all_token_ids) >= (len(self.block_hashes) + 1) * hasher.block_size:
            hasher.extend(self.block_hashes, self.all_token_ids, self._extra_keys())

    def content_hash(self) -> BlockHash:
        """Return a hash of everything that the KV of all_token_ids depends on, for any block size."""
        assert self._hasher is not None, "a request with a ticket takes part in prefix caching"
        return self._hasher.name_all(self.all_token_ids, self._extra_keys())

    def prompt_tail_name(self) -> BlockHash | None:
        """Return a hash of the prompt's tokens after its last full block; None if there are none."""
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
        """Whether the request has ended on this engine."""
        return self.status.is_finished
