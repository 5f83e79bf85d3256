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

    value: a JSON schema, a regular expression, a JSON list of choices, or an EBNF grammar, by kind; empty for
        json_object
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: Annotated[str, Meta(max_length=2**24)] = ""

    @property
    def is_json(self) -> bool:
        """Whether the output has to be JSON."""
        return self.kind in ("json_schema", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The vector or scores that a request asks for instead of tokens.

    task:       embed: a vector; classify: a score for each class of the classification head; score: the score of a head
                with one class
    pooling:    how the last layer's hidden states become one vector
    normalize:  scale an embedding to length 1
    dimensions: keep only so many of an embedding's first numbers; None: keep all
    activate:   turn the head's logits into scores between 0 and 1
    """

    task: Literal["embed", "classify", "score"] = "embed"
    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: PositiveCount | None = None
    activate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters. The ingress has checked them, so the engine does not check their meaning.

    temperature: 0 means greedy
    top_k:       0 means all tokens
    seed:        the seed and a token's position give the uniform number that decides the token; the ingress draws a
        seed if the client gave none
    logprobs:    how many top log-probabilities to return for each token, beside the sampled token's; None: return no
        log-probabilities at all
    logit_bias:  numbers that are added to the logits before anything else, by token id
    allowed_token_ids: only these tokens are sampled; empty: all tokens may be
    bad_words:   token sequences, none of them empty, that must not occur in the output: after the first tokens of one,
        its last token is not sampled. At least one allowed token is the last token of no bad word (and, with
        min_tokens, does not end the request), so that some token can always be sampled
    stop_token_ids: tokens that end the request; the output includes the stop token
    ignore_eos:  the model's end-of-sequence tokens do not end the request
    min_tokens:  neither EOS nor a stop token is sampled before so many output tokens
    prompt_logprobs: like logprobs, for the prompt's tokens; the whole prompt is computed, even if its KV is cached
    structured_output: the form that the output has to have
    repetition_max_pattern, repetition_min_count: end the request when its output ends in a pattern of at most
        repetition_max_pattern tokens that is repeated at least repetition_min_count times; 0: never
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
        """Whether the request has a penalty, so that sampling depends on the tokens before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_token_rules(self) -> bool:
        """Whether allowed_token_ids or bad_words forbid some tokens."""
        return bool(self.allowed_token_ids or self.bad_words)
