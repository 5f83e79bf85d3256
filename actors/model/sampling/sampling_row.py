"""One request's sampling parameters and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request whose next token is sampled in this step.

    prompt_token_ids, output_token_ids: integers, the tokens so far
    eos_token_ids: the tokens that end the request unless it ignores them
    rules: the token rules of params, prepared; None if it has none
    num_drafts: how many of the last output tokens are drafts, which the output need not keep
    """

    params: SamplingParams
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...]
    rules: TokenRules | None = None
    num_drafts: int = 0
