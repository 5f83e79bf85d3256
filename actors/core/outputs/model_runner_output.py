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
    """Natural log-probabilities of tokens at one position, from the distribution before temperature and filters.

    token_ids[0], logprobs[0]: the sampled token, or the prompt's token; the most likely tokens follow, best first
    rank: the rank of token_ids[0]; 1 is the most likely token
    """

    token_ids: Annotated[list[Annotated[int, Meta(ge=NO_TOKEN, le=MAX_COUNT)]], Meta(max_length=MAX_ITEMS)]
    logprobs: Annotated[list[AnyFloat], Meta(max_length=MAX_ITEMS)]
    rank: Count


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Draft tokens, which may follow a request's output; entry i of draft_token_ids belongs to req_ids[i]."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


class ModelRunnerOutput:
    """The results of a step.

    token_ids: [len(req_ids), most tokens of a request] int64, the sampled tokens of each request, padded with
        NO_TOKEN; a request whose prompt is not wholly computed yet has no token
    logprobs: by request id, for each request that asked, one entry for each sampled token
    num_nans_in_logits: by request id, how many logits were NaN; only requests that have any
    pooler_output: by request id, the vector of each pooling request whose prompt is wholly computed
    prompt_logprobs_dict: by request id, for each request that asked and whose prompt is wholly computed, one entry for
        each prompt token but the first
    draft_token_ids: draft tokens for the next step
    is_replayed: whether the step was a CUDA graph's or a compiled one, and not eager
    adapter_loads: the results of loads, by the adapter's key: None, or why the load has failed
    """

    __slots__ = (
        "adapter_loads",
        "draft_token_ids",
        "is_replayed",
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
        """sampled_token_ids: the tokens of each of req_ids, as lists, or as an array like token_ids."""
        self.req_ids = req_ids
        self.token_ids = sampled_token_ids if isinstance(sampled_token_ids, np.ndarray) else _pad(sampled_token_ids)
        self.logprobs = logprobs or {}
        self.num_nans_in_logits = num_nans_in_logits or {}
        self.pooler_output = pooler_output or {}
        self.prompt_logprobs_dict = prompt_logprobs_dict or {}
        self.draft_token_ids = draft_token_ids
        self.kv_connector_output = kv_connector_output
        self.adapter_loads: dict[str, str | None] = {}
        self.is_replayed = False

    def token_ids_of(self, req_ids: list[str]) -> np.ndarray:
        """Return the rows of token_ids in the order of req_ids; a request that is not in the step has no tokens."""
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
