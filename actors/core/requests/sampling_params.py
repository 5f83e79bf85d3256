"""How a request's tokens are sampled and when it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from msgspec import Meta

from kv_transfer.message_ranges import MAX_COUNT, Count, PositiveCount, TokenId

_MAX_FLOAT: Final = 1.7976931348623157e308
_Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
_Penalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
_LogitBias = Annotated[float, Meta(ge=-1e6, le=1e6)]
_BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=4096)]
_TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=1_000_000)]

Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class StructuredOutputParams:
    """The form that a request's output has to have.

    value: a JSON schema, a regular expression, a JSON list of choices, or an EBNF grammar; nothing for json_object
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: Annotated[str, Meta(max_length=2**24)] = ""

    @property
    def is_json(self) -> bool:
        """Whether the output is JSON by what it is called."""
        return self.kind in ("json_schema", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The vector or scores that a request asks for instead of tokens.

    task:       score is what a classification head with one class says
    pooling:    of the last layer's hidden states
    normalize:  an embedding, to length 1
    dimensions: keep so many of an embedding's first numbers; None: all
    activate:   make scores of the head's logits
    """

    task: Literal["embed", "classify", "score"] = "embed"
    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: PositiveCount | None = None
    activate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters. The ingress validates user input; the engine takes them as valid.

    temperature: 0 means greedy
    top_k:       0 means all tokens
    seed:        one uniform number per (seed, position) decides each token; Serving draws one where the user gave none
    logprobs:    how many top log-probabilities to return per token besides the sampled one's; None for none at all
    logit_bias:  added to the logits before anything else, by token id
    allowed_token_ids: no other token is sampled; empty: all may be
    bad_words:   token sequences, none empty, that the output must not have: after the beginning of one its last token
        is not sampled. Some allowed token ends none of them (and does not end the request, where there are min_tokens)
    stop_token_ids: end the request; the token is part of the output
    ignore_eos:  go on past the model's end-of-sequence tokens
    min_tokens:  neither EOS nor a stop token can be sampled before so many output tokens
    prompt_logprobs: like logprobs, for the prompt's tokens: these are all computed, whatever the prefix cache has
    structured_output: what the output has to be
    repetition_max_pattern: stop when the output ends in the same tokens again and again: at most so many tokens, at
        least repetition_min_count times; 0: go on
    """

    temperature: Annotated[float, Meta(ge=0.0, le=_MAX_FLOAT)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: _Fraction = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    seed: Annotated[int, Meta(ge=0)] = 0
    max_tokens: PositiveCount = 16
    min_tokens: Count = 0
    stop_token_ids: _TokenIds = ()
    ignore_eos: bool = False
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    logit_bias: Annotated[dict[TokenId, _LogitBias], Meta(max_length=1_000_000)] = field(default_factory=dict)
    allowed_token_ids: _TokenIds = ()
    bad_words: Annotated[tuple[_BadWord, ...], Meta(max_length=100_000)] = ()
    structured_output: StructuredOutputParams | None = None
    repetition_max_pattern: Annotated[int, Meta(ge=0, le=256)] = 0
    repetition_min_count: Annotated[int, Meta(ge=2, le=MAX_COUNT)] = 3

    @property
    def has_penalties(self) -> bool:
        """Whether sampling looks at the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_token_rules(self) -> bool:
        """Whether some tokens are never sampled, or not after some others."""
        return bool(self.allowed_token_ids or self.bad_words)
