"""Token rules for tests: what bites in a given output, and what generate() says under the same rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, NoBadWordsLogitsProcessor

from tests.checkpoints import VOCAB_SIZE
from tests.reference import load_model

ALLOWED: Final = tuple(token_id for token_id in range(VOCAB_SIZE) if token_id % 3 == 1)
"""A third of all tokens."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """words: as a client says them; token_ids: what they are to an engine"""

    words: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]


def words_in(directory: Path, output: Sequence[int]) -> BadWords:
    """Words of letters and digits, of one token and of two, that an output has: it would be another one without."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    words, sequences = [], []
    for length in (1, 2):
        starts = range(len(output) - length + 1)
        decoded = [str(tokenizer.decode(list(output[start : start + length]))) for start in starts]
        texts = dict.fromkeys(text.lstrip() for text in decoded)
        shown = [text for text in texts if text.isascii() and text.isalnum() and len(encode(text)) == length]
        for text in shown[:2]:
            words.append(text)
            own, spaced = encode(text), encode(" " + text)
            sequences += [own, spaced] if len(own) == len(spaced) and own[0] != spaced[0] else [own]
    return BadWords(tuple(words), tuple(map(tuple, sequences)))


def ruled_tokens(
    directory: Path,
    prompt: Sequence[int],
    num_tokens: int,
    allowed: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[int]:
    """The next tokens after a prompt, by transformers' generate() and its own processors; its end ignored."""
    processors = LogitsProcessorList([OutputRules(len(prompt), bad_words)] if bad_words else [])
    tokens = load_model(directory).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        logits_processor=processors,
        prefix_allowed_tokens_fn=(lambda _, __: list(allowed)) if allowed else None,
    )
    output: list[int] = tokens[0, len(prompt) :].tolist()
    return output


class OutputRules(LogitsProcessor):
    """transformers' NoBadWordsLogitsProcessor, which would look at the prompt too."""

    def __init__(self, num_prompt_tokens: int, bad_words: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._own = NoBadWordsLogitsProcessor([list(word) for word in bad_words])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self._own(input_ids[:, self._num_prompt_tokens :], scores)
        return changed
