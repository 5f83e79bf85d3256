"""The state that the sampler keeps of a request is right after drafts, preemptions and changes of rows.

Tests of actors/model/sampling/logit_changes.py, actors/model/sampling/sampling_batch.py,
actors/model/sampling/sampling_row.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.core.outputs.scheduler_output import NewRequestData, ResumedRequestData
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.input_batch import InputBatch
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_row import SamplingRow
from tests.actors.model.sampling.plain_sampler import sample_plainly
from tests.actors.model.test_input_batch import differences

VOCAB_SIZE = 12
NUM_ROWS = 2
EOS = (0,)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)
PARAMS = st.sampled_from(
    [
        SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.3),
        SamplingParams(seed=4, repetition_penalty=1.8),
        SamplingParams(seed=5, repetition_penalty=0.5, frequency_penalty=-0.4, logit_bias={3: 1.0}),
        SamplingParams(seed=6, min_tokens=3, stop_token_ids=(5,), bad_words=((2, 4), (7,))),
        SamplingParams(seed=7, allowed_token_ids=(1, 2, 4, 9), bad_words=((2,),)),
        SamplingParams(seed=8),
    ]
)


@dataclass
class Known:
    """A request as the test knows it."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class RowsMachine(RuleBasedStateMachine):
    """Requests in rows, sampled after every rule, with drafts and without."""

    @initialize()
    def start(self) -> None:
        self.batch = InputBatch(max_num_seqs=NUM_ROWS, max_model_len=64, block_size=16)
        self.requests: dict[int, Known] = {}
        self.num_steps = 0
        for row in range(NUM_ROWS):
            self.add(row, SamplingParams(seed=row, repetition_penalty=1.3), [1, 2], [])

    def add(self, row: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
        self.requests[row] = Known(params, [*prompt, 1], list(output))
        new = NewRequestData(
            req_id=f"in {row}",
            row=row,
            prompt_token_ids=[*prompt, 1],
            output_token_ids=list(output),
            sampling_params=params,
            eos_token_ids=EOS,
            block_ids=([row],),
            num_computed_tokens=0,
        )
        self.batch.update(differences(new=(new,)))

    @rule(row=st.integers(0, NUM_ROWS - 1), params=PARAMS, prompt=TOKENS, output=TOKENS)
    def replace(self, row: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
        self.batch.update(differences(finished=(f"in {row}",)))
        self.add(row, params, prompt, output)

    @rule(row=st.integers(0, NUM_ROWS - 1), tokens=TOKENS)
    def append(self, row: int, tokens: list[int]) -> None:
        for token_id in tokens if len(self.requests[row].output) < 30 else ():
            self.batch.append(np.array([row]), np.array([token_id]))
            self.requests[row].output.append(token_id)

    @precondition(lambda self: self.requests[0].output)
    @rule(num_void=st.integers(0, 1), other=st.integers(0, VOCAB_SIZE - 1))
    def come_back_with_fewer_tokens(self, num_void: int, other: int) -> None:
        """A preempted request loses the token that was sampled meanwhile, and gets another."""
        request = self.requests[0]
        request.output = request.output[: len(request.output) - num_void]
        num_tokens = len(request.prompt) + len(request.output)
        self.batch.update(differences(preempted=("in 0",)))
        self.batch.update(differences(resumed=(ResumedRequestData("in 0", 0, num_tokens, ([0],)),)))
        self.batch.append(np.array([0]), np.array([other]))
        request.output.append(other)

    @rule(drafts=TOKENS)
    def verify(self, drafts: list[int]) -> None:
        """Sample row 0 after each draft, of which none is kept."""
        start = len(self.requests[0].prompt) + len(self.requests[0].output)
        self.batch.tokens.token_ids[0, start : start + len(drafts)] = drafts
        self.check([0] * (len(drafts) + 1), drafts)

    @invariant()
    def sampled_tokens_are_those_of_a_plain_sampler(self) -> None:
        self.check(list(range(NUM_ROWS)), [])

    def check(self, rows: list[int], drafts: list[int]) -> None:
        self.num_steps += 1
        num_drafts = np.arange(len(rows)) if drafts else np.zeros(len(rows), dtype=np.int64)
        logits = torch.randn((len(rows), VOCAB_SIZE), generator=torch.Generator().manual_seed(self.num_steps))
        expected = []
        for row, count in zip(rows, num_drafts.tolist(), strict=True):
            known = self.requests[row]
            output = np.array([*known.output, *drafts[:count]], dtype=np.int64)
            rules = TokenRules.of(known.params)
            expected.append(SamplingRow(known.params, np.array(known.prompt), output, EOS, rules))

        sampled = sample(logits, self.batch.sampling_batch(np.array(rows), num_drafts))

        assert sampled.token_ids == sample_plainly(logits, expected)


RowsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
test_rows = RowsMachine.TestCase
