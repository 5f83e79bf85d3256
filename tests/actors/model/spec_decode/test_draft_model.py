"""The smaller model's cache holds what the row's tokens say, whatever became of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.config import ModelConfig, SchedulerConfig, SpeculativeConfig
from actors.core.outputs.scheduler_output import NewRequestData, SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import SamplingParams
from actors.model.input_batch import InputBatch
from actors.model.loader import load_model
from actors.model.spec_decode.draft_model import DraftModel, DraftModelProposer, load_draft_model
from tests.reference import greedy_tokens, random_prompt

CheckpointOf = Callable[[str], Path]


class Rows:
    """Rows of a persistent batch, and a proposer that looks at them."""

    def __init__(self, model: DraftModel, max_step_tokens: int = 100) -> None:
        self.batch = InputBatch(max_num_seqs=3, max_model_len=128, block_size=16)
        self.proposer = DraftModelProposer(model, self.batch, max_step_tokens)

    def add(self, row: int, prompt: Sequence[int], params: SamplingParams) -> None:
        new = NewRequestData(
            req_id=f"r{row}",
            row=row,
            prompt_token_ids=list(prompt),
            output_token_ids=[],
            sampling_params=params,
            eos_token_ids=(),
            block_ids=([],),
            num_computed_tokens=0,
        )
        empty = SchedulerOutput(batch=StepBatch.empty(), scheduled_new_reqs=[new], finished_req_ids=set())
        self.batch.update(empty)

    def append(self, row: int, *token_ids: int) -> None:
        for token_id in token_ids:
            self.batch.append(np.array([row]), np.array([token_id]))

    @torch.inference_mode()
    def propose(self, *rows: int, num_wanted: int = 3, epoch: int = 1) -> list[list[int]]:
        return self.proposer.propose(np.array(rows), np.full(len(rows), epoch), np.full(len(rows), num_wanted))


@pytest.fixture
def model(checkpoint: CheckpointOf) -> DraftModel:
    directory = str(checkpoint("llama"))
    config = ModelConfig(model=directory, dtype="float32", device="cpu")
    speculative = SpeculativeConfig(method="draft_model", model=directory, cache_tokens=128)
    loaded = load_draft_model(config, SchedulerConfig(speculative=speculative), load_model(config))
    assert loaded is not None
    return loaded


GREEDY = SamplingParams(temperature=0.0)


def test_drafts_are_what_the_model_generates_whatever_became_of_those_before(
    model: DraftModel, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint("llama")
    rows, tokens = Rows(model), random_prompt(20)
    rows.add(0, tokens, GREEDY)
    for num_right, others in ((0, []), (0, [5]), (2, [9]), (0, [6, 7]), (4, []), (0, [8]), (4, [])):
        new = [*greedy_tokens(directory, tuple(tokens), 4)[:num_right], *others]
        rows.append(0, *new)
        tokens += new
        assert rows.propose(0) == [greedy_tokens(directory, tuple(tokens), 3)]


def test_a_long_context_is_read_in_chunks_and_drafted_for_when_it_is_through(
    model: DraftModel, checkpoint: CheckpointOf
) -> None:
    rows, tokens = Rows(model, max_step_tokens=9), random_prompt(20)
    rows.add(0, tokens, GREEDY)
    expected = greedy_tokens(checkpoint("llama"), tuple(tokens), 3)
    assert [rows.propose(0) for _ in range(3)] == [[[]], [[]], [expected]]


def test_a_row_that_others_took_the_blocks_of_is_read_again(model: DraftModel, checkpoint: CheckpointOf) -> None:
    directory = checkpoint("llama")
    rows, prompts = Rows(model), {row: random_prompt(44 + row) for row in range(3)}
    expected = {row: greedy_tokens(directory, tuple(prompt), 3) for row, prompt in prompts.items()}
    for row, prompt in prompts.items():
        rows.add(row, prompt, GREEDY)
    # Each needs three or four of eight blocks.
    for row in (0, 1, 2, 0, 1, 2):
        assert rows.propose(row) == [expected[row]]
    # Together they do not fit; those that have theirs go on.
    assert rows.propose(0, 1, 2) == [[], expected[1], expected[2]]


def test_a_rows_next_owner_finds_nothing_of_its_former_one(model: DraftModel, checkpoint: CheckpointOf) -> None:
    rows, prompt = Rows(model), random_prompt(30)
    rows.add(0, random_prompt(40), GREEDY)
    rows.propose(0)
    rows.batch.update(SchedulerOutput(batch=StepBatch.empty(), scheduled_new_reqs=[], finished_req_ids={"r0"}))
    rows.add(0, prompt, GREEDY)
    assert rows.propose(0, epoch=2) == [greedy_tokens(checkpoint("llama"), tuple(prompt), 3)]
