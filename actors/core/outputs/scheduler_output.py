"""The message from the scheduler to the workers: one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import numpy as np
from msgspec import Meta

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.requests.adapter import AdapterCommands
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature
from actors.core.requests.request import PromptEmbeds
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.message_ranges import (
    MAX_COUNT,
    MAX_ITEMS,
    MAX_KINDS,
    Count,
    RequestIds,
    TokenId,
    TokenIds,
    Total,
    WireName,
)

GroupBlockIds: TypeAlias = Annotated[
    tuple[Annotated[list[Count], Meta(max_length=MAX_ITEMS)], ...], Meta(max_length=MAX_KINDS)
]
"""A list of blocks for each purpose."""
_Drafts: TypeAlias = Annotated[list[Annotated[int, Meta(ge=NO_TOKEN, le=MAX_COUNT)]], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A whole block to copy at the beginning of a step, before the step writes anything.

    source, destination: ids of blocks
    """

    source: Count
    destination: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """All that the worker needs of a request that it does not know, or has forgotten.

    row: the request's row in the persistent batch
    output_token_ids: tokens that were sampled elsewhere (of a resumed or handed-over request)
    block_ids: the blocks of the request's tokens; for a model with recurrent layers also those of its slot
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
    """A preempted request that runs again. The worker knows the request; the request has lost its row and its blocks.

    row: the request's new row in the persistent batch
    num_tokens: how many of the request's tokens are valid; the worker drops tokens that a step sampled after these
    block_ids: all blocks that the request has now, as in NewRequestData
    """

    req_id: WireName
    row: Count
    num_tokens: Count
    block_ids: GroupBlockIds


NOTHING_GROWN: Final = np.zeros((3, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A step's requests in batch order, as arrays [num_requests] of int64.

    rows:    each request's row in the persistent batch
    epochs:  a number that identifies the row's owner: a row gets a new number each time a request gets the row
    num_plain: the first num_plain requests decode one token each, and need no work of their own beside that
    num_new_tokens: tokens to compute, draft tokens included
    num_computed_tokens, num_output_tokens: the counts before this step
    grown: [3, num_new_blocks] int64, blocks that requests get in addition: row, index in the row's block table, id
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
        """Return a step without requests."""
        none = np.zeros(0, dtype=np.int64)
        return cls([], none, none, 0, none, none, none, NOTHING_GROWN)


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which requests compute how many tokens, in which blocks.

    The worker reads batch, scheduled_new_reqs and scheduled_resumed_reqs. num_scheduled_tokens holds the same counts by
    request id, and is computed on demand.

    step_index: counts the steps that compute, 1, 2, 3 …; 0 for a step that computes nothing
    block_copies: copies to make before the step writes anything; no block is the source of one copy and the destination
        of another
    finished_req_ids: requests that ended since the last step, whether the worker knows them or not; the worker forgets
        them before it reads anything else, since a new request may have the id of one of them
    preempted_req_ids: requests that lost their blocks in this step
    scheduled_spec_decode_tokens: draft tokens that this step verifies, by request id
    num_drafts_wanted: [num_requests] int64, how many tokens to draft for each request after this step, in batch order;
        None: no request gets draft tokens
    scheduled_encoder_inputs: images to encode before the forward pass, by request id
    free_encoder_mm_hashes: encoder outputs to forget
    structured_output_request_ids: requests that need a grammar's mask, with their positions in the batch
    grammar_bitmask: [num_rows, ceil(vocab_size / 32)] int32, 1 for allowed tokens; each of
        structured_output_request_ids has a row, followed by a row for each of its draft tokens; filled in between
        schedule() and the forward pass
    adapter_commands: adapters to load and to drop while this step runs
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
    free_encoder_mm_hashes: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    structured_output_request_ids: Annotated[dict[WireName, Count], Meta(max_length=MAX_ITEMS)] = field(
        default_factory=dict
    )
    grammar_bitmask: np.ndarray | None = None
    adapter_commands: AdapterCommands | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None

    def is_empty(self) -> bool:
        """Whether the worker has nothing to do: nothing to compute, to forget or to transfer."""
        no_transfer = self.kv_connector_metadata is None or self.kv_connector_metadata.is_empty()
        is_forgetful = self.finished_req_ids or self.preempted_req_ids or self.free_encoder_mm_hashes
        has_commands = self.adapter_commands is not None
        return self.total_num_scheduled_tokens == 0 and not (is_forgetful or has_commands) and no_transfer

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """The numbers of tokens to compute, by request id, in batch order."""
        return dict(zip(self.batch.req_ids, self.batch.num_new_tokens.tolist(), strict=True))
