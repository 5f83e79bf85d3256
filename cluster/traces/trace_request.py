"""A request of a trace, whatever the form of its file; and the bounds that hold for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

BLOCK_TOKENS: Final = 512
"""The number of tokens that an id of a block stands for."""
MAX_TRACE_TOKENS: Final = 10_000_000
"""The most tokens of a prompt, and of an output: larger numbers are mistakes."""
MAX_BLOCK_ID: Final = 2**63 - 1

InputTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACE_TOKENS)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TRACE_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as it was recorded.

    request_id:        unique in the trace
    arrival_s:         seconds from the first request of the trace, at least 0; requests come in the order of arrival
    num_input_tokens:  tokens of the prompt, at least 1
    num_output_tokens: at least 1, since a server makes at least one token
    blocks:            an id for each BLOCK_TOKENS tokens of the prompt, the last one possibly for fewer. Equal ids
                       stand for prompts that are equal up to the end of the block. Empty: nothing is known
    tenant:            the tenant that the request belonged to
    ttft_s, itl_s:     the request's own aims; None if it had none
    num_cached_tokens: tokens of the prompt that were cached where it was recorded; 0 if the trace does not say
    """

    request_id: str
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    num_cached_tokens: int = 0


def check_blocks(blocks: Sequence[int], num_input_tokens: int, name: str) -> None:
    """Raise ValueError if there is not one id for each BLOCK_TOKENS tokens, the last one possibly for fewer."""
    num_needed = math.ceil(num_input_tokens / BLOCK_TOKENS)
    if len(blocks) != num_needed:
        few = "few" if len(blocks) < num_needed else "many"
        raise ValueError(
            f"{len(blocks)} {name} are too {few} for {num_input_tokens} tokens: each stands for {BLOCK_TOKENS}, "
            f"so there should be {num_needed}"
        )
