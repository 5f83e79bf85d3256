"""Makes token sequences of the words that an output must not have; engines keep these sequences out of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.parameters.sampling_options import SamplingOptions
from cluster.parameters.sampling_rules import Violations
from cluster.text.model_tokenizer import ModelTokenizer

TokenSequences = tuple[tuple[int, ...], ...]


def tokenize_bad_words(words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int) -> TokenSequences:
    """Tokenize words as vLLM does: as they are, and after a space if that gives as many tokens with another first one.

    So a word is kept out of the beginning and of the middle of a text. Leading spaces of a word are ignored. A sequence
    with a token that the model cannot give is left out. Raises InvalidRequest for a word that has no tokens.
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
    """Check that every position has an allowed token that completes no bad word and does not end the output too early.

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
