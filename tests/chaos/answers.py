"""The right answers: transformers' generate(), and for sampled ones its logits and a draw of our own.

A sampled token is the one at which the cumulative probability passes a number that seed and position give. Where the
two are nearly the same, float32 does not say which token it is: a prompt that is computed in other chunks, or in
another batch, can turn it. Such a question has no right answer, and is not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from actors.model.philox import uniforms
from tests.chaos.visits import TEMPERATURE, Question
from tests.reference import greedy_tokens, load_model

_CLEAR_MARGIN: Final = 2e-6
"""Of a cumulative probability. An answer that did turn was 2e-8 from turning; ones at 2e-7 did not."""


def learn_answers(questions: Sequence[Question], model_directory: Path) -> list[Asked]:
    """Work out every answer; a sampled question that has none gets the next seed."""
    return [_learn(question, model_directory) for question in questions]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that has a right answer."""

    question: Question
    answer: Sequence[int]


def _learn(question: Question, model_directory: Path) -> Asked:
    if question.sampling_seed is None:
        return Asked(question, greedy_tokens(model_directory, question.prompt, question.num_tokens))
    for seed in itertools.count(question.sampling_seed):
        numbers = uniforms(
            np.full(question.num_tokens, seed, dtype=np.uint64), np.arange(question.num_tokens, dtype=np.uint64)
        )
        answer = draw_by(numbers.tolist(), question.prompt, model_directory)
        if answer is not None:
            return Asked(replace(question, sampling_seed=seed), answer)
    raise AssertionError("unreachable: seeds do not end")


@torch.no_grad()
def draw_by(numbers: Sequence[float], prompt: Sequence[int], model_directory: Path) -> list[int] | None:
    """The tokens at which cumulative probabilities pass these numbers; None if one of them is not clear."""
    model = load_model(model_directory)
    token_ids: list[int] = []
    cache, fresh = None, list(prompt)
    for number in numbers:
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        cumulative = torch.softmax(output.logits[0, -1].double() / TEMPERATURE, dim=-1).cumsum(dim=-1)
        if float((cumulative - number).abs().min()) < _CLEAR_MARGIN:
            return None
        fresh = [int((cumulative > number).nonzero()[0])]
        token_ids += fresh
    return token_ids
