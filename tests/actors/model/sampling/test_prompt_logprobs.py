"""A part of a prompt has its own log-probabilities, however many rows it has and whatever stands beside it.

Tests of actors/model/sampling/prompt_logprobs.py; tests/actors/test_logprobs.py compares engines with transformers.
"""

from __future__ import annotations

import numpy as np
import torch

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.outputs.scheduler_output import NOTHING_GROWN, StepBatch
from actors.model.sampling.logprobs import token_logprobs
from actors.model.sampling.prompt_logprobs import PromptLogprobs

VOCAB_SIZE = 30
LENGTHS = {"a": 200, "b": 70}
NUM_TOP = {"a": 2, "b": 0}
ROWS = {"a": 2, "b": 0}
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = {name: torch.randint(0, VOCAB_SIZE, (length,), generator=GENERATOR) for name, length in LENGTHS.items()}
LOGITS = {name: torch.randn(length, VOCAB_SIZE, generator=GENERATOR) for name, length in LENGTHS.items()}
"""The logits after every position of a prompt, about the token that follows."""


def expected_of(name: str) -> list[TokenLogprobs]:
    return token_logprobs(LOGITS[name][:-1], TOKENS[name][1:], NUM_TOP[name])


def prompts() -> PromptLogprobs:
    token_ids = np.zeros((3, 256), dtype=np.int32)
    for name, row in ROWS.items():
        token_ids[row, : LENGTHS[name]] = TOKENS[name].numpy()
    made = PromptLogprobs(token_ids)
    for name, row in ROWS.items():
        made.begin(row, NUM_TOP[name], LENGTHS[name])
    return made


def step(made: PromptLogprobs, parts: dict[str, tuple[int, int]]) -> dict[str, list[TokenLogprobs]]:
    """Compute positions [first, stop) of each prompt; returns the log-probabilities of prompts that end."""
    counts = np.array([stop - first for first, stop in parts.values()])
    zeros = np.zeros(len(parts), dtype=np.int64)
    batch = StepBatch(
        req_ids=list(parts),
        rows=np.array([ROWS[name] for name in parts]),
        epochs=zeros,
        num_plain=0,
        num_new_tokens=counts,
        num_computed_tokens=np.array([first for first, _ in parts.values()]),
        num_output_tokens=zeros,
        grown=NOTHING_GROWN,
    )
    found = made.find_parts(batch, np.concatenate([[0], np.cumsum(counts)]))
    if found is None:
        return {}
    logits = torch.cat([LOGITS[name][first:stop] for name, (first, stop) in parts.items()])
    return made.take_in(found, logits[torch.from_numpy(found.logits_indices)])


def test_parts_of_many_rows_beside_each_other_are_collected_in_order() -> None:
    made = prompts()
    assert step(made, {"a": (0, 130)}) == {}
    assert step(made, {"b": (0, 69), "a": (130, 133)}) == {}
    assert step(made, {"a": (133, 200), "b": (69, 70)}) == {"a": expected_of("a"), "b": expected_of("b")}
    assert step(made, {"a": (200, 201)}) == {}, "nothing is collected any more"


def test_a_prompt_whose_request_has_left_begins_anew() -> None:
    made = prompts()
    step(made, {"a": (0, 100), "b": (0, 5)})
    made.forget(ROWS["a"])
    assert step(made, {"a": (0, 200)}) == {}, "another request in the row, which wants none"
    made.begin(ROWS["a"], NUM_TOP["a"], LENGTHS["a"])
    assert step(made, {"b": (5, 70), "a": (0, 200)}) == {"a": expected_of("a"), "b": expected_of("b")}
