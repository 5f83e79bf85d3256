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

from actors.model.config.config_rules import keeps_served_states
from actors.model.sampling.philox import uniforms
from tests.chaos.visits import TEMPERATURE, Question
from tests.checkpoints import VOCAB_SIZE
from tests.reference import greedy_tokens, load_model


@dataclass(frozen=True, slots=True)
class Margins:
    """The least distance of a clear answer from a cumulative probability, and of its two largest logits."""

    probability: float
    logit: float


MARGINS: Final = Margins(2e-6, 5e-5)
"""A sampled answer that did turn was 2e-8 away; ones at 2e-7 did not. A greedy answer that did turn had its logits
1.1e-5 apart in float64; transformers has them 6e-6 to -5e-7 apart there in float32, by its attention implementation and
by whether it goes token by token."""
MARGINS_WITH_STATES: Final = Margins(1e-5, 2e-4)
"""With recurrent states, which move logits by up to 1e-4 if they are computed again in other chunks."""


def margins_of(model_directory: Path) -> Margins:
    """Return the margins within which a model's answers may turn."""
    return MARGINS_WITH_STATES if keeps_served_states(load_model(model_directory).config) else MARGINS


def learn_answers(questions: Sequence[Question], model_directory: Path) -> list[Asked]:
    """Work out every answer; a sampled question that has none gets the next seed, a greedy one another last token."""
    margins = margins_of(model_directory)
    return [_learn(question, model_directory, margins) for question in questions]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that has a right answer."""

    question: Question
    answer: Sequence[int]


def _learn(question: Question, model_directory: Path, margins: Margins) -> Asked:
    if question.sampling_seed is None:
        return _learn_greedy(question, model_directory, margins.logit)
    for seed in itertools.count(question.sampling_seed):
        numbers = uniforms(
            np.full(question.num_tokens, seed, dtype=np.uint64), np.arange(question.num_tokens, dtype=np.uint64)
        )
        answer = draw_by(numbers.tolist(), question.prompt, model_directory, margins.probability)
        if answer is not None:
            return Asked(replace(question, sampling_seed=seed), answer)
    raise AssertionError("unreachable: seeds do not end")


def _learn_greedy(question: Question, model_directory: Path, margin: float) -> Asked:
    for last in itertools.count(question.prompt[-1]):
        prompt = (*question.prompt[:-1], last % VOCAB_SIZE)
        answer = greedy_tokens(model_directory, prompt, question.num_tokens)
        if least_logit_margin(prompt, answer, model_directory) >= margin:
            return Asked(replace(question, prompt=prompt), answer)
    raise AssertionError("unreachable: count() does not end")


@torch.no_grad()
def least_logit_margin(prompt: Sequence[int], answer: Sequence[int], model_directory: Path) -> float:
    """Between the largest logit and the next one, over all positions of a greedy answer."""
    logits = load_model(model_directory)(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    largest = logits.topk(2, dim=-1).values
    return float((largest[:, 0] - largest[:, 1]).min())


@torch.no_grad()
def draw_by(numbers: Sequence[float], prompt: Sequence[int], model_directory: Path, margin: float) -> list[int] | None:
    """The tokens at which cumulative probabilities pass these numbers; None if one of them is nearer than margin."""
    model = load_model(model_directory)
    token_ids: list[int] = []
    cache, fresh = None, list(prompt)
    for number in numbers:
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        cumulative = torch.softmax(output.logits[0, -1].double() / TEMPERATURE, dim=-1).cumsum(dim=-1)
        if float((cumulative - number).abs().min()) < margin:
            return None
        fresh = [int((cumulative > number).nonzero()[0])]
        token_ids += fresh
    return token_ids
