"""From words that an output must not have to the token sequences that an engine keeps out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations
from cluster.text.model_tokenizer import ModelTokenizer

TokenSequences = tuple[tuple[int, ...], ...]


def tokenize_bad_words(words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int) -> TokenSequences:
    """Tokenize words as vLLM does: each as it is, and after a space where that is as many tokens and begins otherwise.

    So both what begins a text and what is in the middle of one is meant. Leading spaces of a word do not count. What
    has a token that the model cannot give needs no rule. Raises InvalidRequest for a word that is no tokens.
    """
    plain = tokenizer.encode_plain([word.lstrip() for word in words])
    spaced = tokenizer.encode_plain([f" {word.lstrip()}" for word in words])
    if not all(plain):
        violations = Violations()
        word = next(word for word, token_ids in zip(words, plain, strict=True) if not token_ids)
        violations.add("sampling_params.bad_words", repr(word), "words of which the tokenizer makes tokens")
        violations.raise_if_any()
    sequences = dict.fromkeys(_sequences(plain, spaced))
    return tuple(sequence for sequence in sequences if max(sequence) < vocab_size)


def _sequences(plain: list[list[int]], spaced: list[list[int]]) -> Iterator[tuple[int, ...]]:
    for own, other in zip(plain, spaced, strict=True):
        yield tuple(own)
        if len(own) == len(other) and own[0] != other[0]:
            yield tuple(other)


def check_something_is_left(
    options: SamplingOptions, bad_words: TokenSequences, eos_token_ids: Sequence[int], vocab_size: int
) -> None:
    """Some token must be possible at every position: one that is allowed, ends no bad word, nor the request too soon.

    Raises InvalidRequest.
    """
    if not bad_words and options.allowed_token_ids is None:
        return
    never = {sequence[-1] for sequence in bad_words}
    if options.min_tokens:
        never.update(eos_token_ids, options.stop_token_ids)
    allowed = range(vocab_size) if options.allowed_token_ids is None else options.allowed_token_ids
    if never.issuperset(allowed):
        violations = Violations()
        name = "bad_words" if bad_words else "allowed_token_ids"
        value = options.bad_words if bad_words else options.allowed_token_ids
        too_soon = ", nor, with min_tokens, ends the output" if options.min_tokens else ""
        wanted = f"such that some allowed token is the last one of no bad word{too_soon}"
        violations.require(False, f"sampling_params.{name}", value, wanted)
        violations.raise_if_any()
