"""The message from a worker to the scheduler: what a step has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.message_ranges import MAX_COUNT, MAX_ITEMS, AnyFloat, Count

NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the distribution before temperature and filters.

    token_ids[0], logprobs[0]: the sampled token; the top ones follow, best first
    rank: the sampled token's rank, 1 is the most likely
    """

    token_ids: Annotated[list[Annotated[int, Meta(ge=NO_TOKEN, le=MAX_COUNT)]], Meta(max_length=MAX_ITEMS)]
    logprobs: Annotated[list[AnyFloat], Meta(max_length=MAX_ITEMS)]
    rank: Count


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Tokens that a drafter proposes to go on with; the lists are parallel."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


class ModelRunnerOutput:
    """The results of a step.

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

    def token_ids_of(self, req_ids: list[str]) -> np.ndarray:
        """Return token_ids in the order of req_ids; a request that the step did not have has no tokens."""
        if self.req_ids == req_ids:
            return self.token_ids
        index_of = {req_id: index for index, req_id in enumerate(self.req_ids)}
        none = np.full((1, self.token_ids.shape[1]), NO_TOKEN, dtype=np.int64)
        return np.concatenate([self.token_ids, none])[[index_of.get(req_id, -1) for req_id in req_ids]]


def _pad(token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    padded = np.full((len(token_ids), max(map(len, token_ids), default=0) or 1), NO_TOKEN, dtype=np.int64)
    for row, tokens in zip(padded, token_ids, strict=True):
        row[: len(tokens)] = tokens
    return padded
