"""The work that a request brings to one engine, as the ingress that has sent it predicts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kv_transfer.message_ranges import Total, WireName

_Amount = Annotated[float, Meta(ge=0, le=1e18)]
_Part = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class SentWork:
    """The work that a request brings to one engine.

    num_computed_tokens: tokens of its prompt that this engine computes
    prefill_s:           the time that takes, as predicted
    num_context_tokens:  the request's tokens, if this engine decodes it; 0 if it does not
    consumer:            the engine that this one hands the KV over to; None: it does not hand over
    num_handoff_bytes:   the bytes of that handoff
    num_output_tokens:   the tokens that it is expected to decode here; 0 if it decodes elsewhere
    late_part:           the probability that its first token is late, as predicted, if it decodes here
    """

    num_computed_tokens: _Amount = 0.0
    prefill_s: _Amount = 0.0
    num_context_tokens: Total = 0
    consumer: WireName | None = None
    num_handoff_bytes: _Amount = 0.0
    num_output_tokens: _Amount = 0.0
    late_part: _Part = 0.0

    def num_blocks(self, block_size: int, num_state_blocks: int = 0) -> int:
        """Return the number of blocks that the request takes at the engine at once, its recurrent state included."""
        num_tokens = self.num_context_tokens + 1 if self.num_context_tokens else int(self.num_computed_tokens)
        return -(-num_tokens // block_size) + (num_state_blocks if num_tokens else 0)
