"""The sampling parameters that a client may give: this is the one place where each is declared.

A field of SamplingOptions has the parameter's name, its type, and the ranges outside of which it is refused, with the
words for the client. What follows from it:

    gRPC     the fields of raypd.v1.SamplingParams are read by these names (api/grpc/conversions/generate.py)
    HTTP     the bodies' models get a field for each (api/http/requests.py), by vLLM's name, which is the same
    client   the keywords of its methods (client/sampling_keywords.py, which `make client` writes)
    checks   check_sampling()
    engines  resolve_sampling() fills the fields of the same names of SamplingParams, which has the defaults, and the
             bounds that every engine checks when it decodes a request
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.api.protos.sample_seeds import MAX_SEED
from cluster.parameters.ranges import AtMost, Between, KnownTokens, NumChars, Range, UpTo, ValuesBetween

MAX_INT32: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class OtherWords:
    """Marks a parameter whose field an API declares itself. http, client: whether the HTTP API, or the client, does"""

    http: bool = False
    client: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters as a client gave them; None is "not given". raypd/v1/generate.proto describes each."""

    temperature: Annotated[
        float | None, Between(0, sys.float_info.max, "a finite number, at least 0 (0 is greedy)")
    ] = None
    top_k: Annotated[int | None, Between(-1, MAX_INT32, "at least 1, or 0 (or -1) for all tokens")] = None
    top_p: Annotated[float | None, Between(0, 1, "more than 0, at most 1", is_above=True)] = None
    min_p: Annotated[float | None, Between(0, 1)] = None
    presence_penalty: Annotated[float | None, Between(-2, 2)] = None
    frequency_penalty: Annotated[float | None, Between(-2, 2)] = None
    repetition_penalty: Annotated[
        float | None, Between(0, 10, "more than 0, at most 10 (1 is none)", is_above=True)
    ] = None
    seed: Annotated[int | None, Between(0, MAX_SEED)] = None
    logprobs: Annotated[int | None, UpTo("max_logprobs"), OtherWords(http=True)] = None
    prompt_logprobs: Annotated[int | None, UpTo("max_logprobs")] = None
    max_tokens: Annotated[int | None, Between(1, MAX_INT32, "at least 1")] = None
    min_tokens: Annotated[int | None, Between(0, MAX_INT32, "at least 0")] = None
    stop: Annotated[
        tuple[str, ...], AtMost("max_stop_strings", "strings"), NumChars("max_stop_string_chars", "strings")
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], AtMost("max_stop_token_ids", "tokens"), KnownTokens()] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Annotated[
        dict[int, float], AtMost("max_logit_bias", "tokens"), KnownTokens(), ValuesBetween(-100, 100)
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[
        tuple[int, ...] | None, AtMost("max_allowed_token_ids", "tokens", at_least=1), KnownTokens()
    ] = None
    bad_words: Annotated[
        tuple[str, ...],
        AtMost("max_bad_words", "words"),
        NumChars("max_bad_word_chars", "words", may_be_blank=False),
    ] = ()
    skip_special_tokens: bool = True
    structured_output: Annotated[StructuredOutputParams | None, OtherWords(http=True, client=True)] = None


NO_OPTIONS: Final = SamplingOptions()


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of one parameter. kind: the type of a value that was given, such as float or tuple[str, ...]"""

    name: str
    kind: Any
    ranges: tuple[Range, ...]
    other_words: OtherWords

    @property
    def is_list(self) -> bool:
        """Whether a value is a list, of texts or of tokens."""
        return get_origin(self.kind) is tuple

    @property
    def is_map(self) -> bool:
        """Whether a value maps tokens to numbers."""
        return get_origin(self.kind) is dict


def _declared() -> Iterator[Parameter]:
    hints = get_type_hints(SamplingOptions, include_extras=True)
    for one in fields(SamplingOptions):
        hint = hints[one.name]
        metadata: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, metadata = hint.__origin__, hint.__metadata__
        others = [each for each in metadata if isinstance(each, OtherWords)]
        ranges = tuple(each for each in metadata if not isinstance(each, OtherWords))
        yield Parameter(one.name, _without_none(hint), ranges, others[0] if others else OtherWords())


def _without_none(hint: Any) -> Any:
    if NoneType not in get_args(hint):
        return hint
    [kind] = (one for one in get_args(hint) if one is not NoneType)
    return kind


PARAMETERS: Final = {one.name: one for one in _declared()}
