"""The keywords of sampling parameters. `make client` writes them as they are declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingKeywords(TypedDict, total=False):
    """The fields of raypd.v1.SamplingParams, which says what each of them means. What is absent has its default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logprobs: int
    prompt_logprobs: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    skip_special_tokens: bool
