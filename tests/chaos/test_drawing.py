"""Draws from a seed: faults, visits, questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.chaos import answers
from tests.chaos.answers import (
    MARGINS,
    MARGINS_WITH_STATES,
    draw_by,
    learn_answers,
    least_logit_margin,
    margins_of,
)
from tests.chaos.faults import OF_INGRESS, TWO_AND_TWO, FaultKind, Fleet, draw_faults
from tests.chaos.visits import TEMPERATURE, draw_questions, draw_visits
from tests.reference import load_model

ALL = frozenset(FaultKind)
ENGINE_IDS = TWO_AND_TWO.engine_ids


def test_a_seed_draws_the_same_again() -> None:
    assert draw_faults(7, 50, 1.0, ALL, ENGINE_IDS) == draw_faults(7, 50, 1.0, ALL, ENGINE_IDS)
    assert draw_faults(7, 50, 1.0, ALL, ENGINE_IDS) != draw_faults(8, 50, 1.0, ALL, ENGINE_IDS)
    assert draw_questions(7, 20) == draw_questions(7, 20) != draw_questions(8, 20)
    first, again, other = (list(islice(draw_visits(seed, 5.0, 20), 50)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("fleet", [TWO_AND_TWO, Fleet(1, 2)], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_comes_to_whom_it_may_come(seed: int, fleet: Fleet) -> None:
    faults = draw_faults(seed, len(ALL), 1.0, ALL, fleet.engine_ids)
    assert sorted(fault.kind for fault in faults) == sorted(ALL)
    targets = {fault.kind: fault.engine_id for fault in faults}
    assert targets[FaultKind.KILL_PREFILL].startswith("prefill-")
    assert targets[FaultKind.KILL_DECODE].startswith("decode-")
    nobodys = OF_INGRESS | {FaultKind.KILL_CONTROLLER, FaultKind.STEP_CLOCK}
    assert {targets[kind] for kind in nobodys} == {""}
    assert set(targets.values()) <= {"", *fleet.engine_ids}


def test_only_the_kinds_that_are_possible_come() -> None:
    kinds = {FaultKind.KILL_DECODE, FaultKind.SHORT_STOP}
    assert {fault.kind for fault in draw_faults(1, 30, 1.0, kinds, ENGINE_IDS)} == kinds


def test_visits_come_at_the_rate_that_was_asked_for() -> None:
    visits = list(islice(draw_visits(1, 5.0, 20), 2000))
    assert sum(visit.after_s for visit in visits) == pytest.approx(2000 / 5.0, rel=0.1)
    assert {visit.question for visit in visits} == set(range(20))


def test_a_draw_that_rounding_could_turn_has_no_answer(checkpoint: Callable[[str], Path]) -> None:
    prompt = [5, 6, 7]
    logits = load_model(checkpoint("llama"))(torch.tensor([prompt])).logits[0, -1].double()
    boundary = torch.softmax(logits / TEMPERATURE, dim=-1).cumsum(dim=-1)[100].item()
    for number in (boundary + 1e-8, boundary - 1e-8):
        assert draw_by([number], prompt, checkpoint("llama"), MARGINS.probability) is None


def test_a_greedy_answer_that_rounding_could_turn_is_not_asked_for(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = next(question for question in draw_questions(1, 10) if question.sampling_seed is None)
    [asked] = learn_answers([question], checkpoint("llama"))
    margin = least_logit_margin(asked.question.prompt, asked.answer, checkpoint("llama"))
    assert margin >= MARGINS.logit
    monkeypatch.setattr(answers, "MARGINS", replace(MARGINS, logit=margin * 1.01))
    [other] = learn_answers([question], checkpoint("llama"))
    assert other.question.prompt[:-1] == asked.question.prompt[:-1]
    assert least_logit_margin(other.question.prompt, other.answer, checkpoint("llama")) > margin


def test_answers_from_recurrent_states_have_wider_margins(checkpoint: Callable[[str], Path]) -> None:
    """A state that is computed again, in other chunks, differs more than KV does."""
    assert margins_of(checkpoint("lfm2")) == MARGINS_WITH_STATES
    assert margins_of(checkpoint("llama")) == MARGINS


def test_every_question_has_an_answer_of_its_length(checkpoint: Callable[[str], Path]) -> None:
    for asked in learn_answers(draw_questions(1, 4), checkpoint("llama")):
        assert len(asked.answer) == asked.question.num_tokens
