"""The right answers: transformers' generate(), and for sampled ones its logits and a draw of our own.

A sampled token is the one at which the cumulative probability passes a number that seed and position give. Where the
two are nearly the same, float32 does not say which token it is: a prompt that is computed in other chunks, or in
another batch, can turn it. The same goes for a greedy token whose logit is hardly more than the next one's. Such a
question has no right answer, and is not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from actors.model.sampling.philox import uniforms
from tests.chaos.visits import TEMPERATURE, Question
from tests.checkpoints import VOCAB_SIZE
from tests.reference import greedy_tokens, load_model

_CLEAR_MARGIN: Final = 2e-6
"""The least distance from a cumulative probability. An answer that did turn was 2e-8 away; ones at 2e-7 did not."""
_CLEAR_LOGIT_MARGIN: Final = 5e-5
"""The least distance of the two largest logits. An answer that did turn had them 1.1e-5 apart in float64; transformers
has them 6e-6 to -5e-7 apart there in float32, by its attention implementation and by whether it goes token by token."""


def learn_answers(questions: Sequence[Question], model_directory: Path) -> list[Asked]:
    """Work out every answer; a sampled question that has none gets the next seed, a greedy one another last token."""
    return [_learn(question, model_directory) for question in questions]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that has a right answer."""

    question: Question
    answer: Sequence[int]


def _learn(question: Question, model_directory: Path) -> Asked:
    if question.sampling_seed is None:
        return _learn_greedy(question, model_directory)
    for seed in itertools.count(question.sampling_seed):
        numbers = uniforms(
            np.full(question.num_tokens, seed, dtype=np.uint64), np.arange(question.num_tokens, dtype=np.uint64)
        )
        answer = draw_by(numbers.tolist(), question.prompt, model_directory)
        if answer is not None:
            return Asked(replace(question, sampling_seed=seed), answer)
    raise AssertionError("unreachable: seeds do not end")


def _learn_greedy(question: Question, model_directory: Path) -> Asked:
    for last in itertools.count(question.prompt[-1]):
        prompt = (*question.prompt[:-1], last % VOCAB_SIZE)
        answer = greedy_tokens(model_directory, prompt, question.num_tokens)
        if least_logit_margin(prompt, answer, model_directory) >= _CLEAR_LOGIT_MARGIN:
            return Asked(replace(question, prompt=prompt), answer)
    raise AssertionError("unreachable: count() does not end")


@torch.no_grad()
def least_logit_margin(prompt: Sequence[int], answer: Sequence[int], model_directory: Path) -> float:
    """Between the largest logit and the next one, over all positions of a greedy answer."""
    logits = load_model(model_directory)(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    largest = logits.topk(2, dim=-1).values
    return float((largest[:, 0] - largest[:, 1]).min())


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
