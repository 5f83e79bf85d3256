"""A grammar allows after drafts what it allows after the same tokens, and drafting leaves no trace.

Tests of actors/model/grammar/matching.py, actors/model/grammar/vocabulary.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.model.grammar.mask import GrammarMask
from actors.model.grammar.matching import EVERY_TOKEN, TokenMatcher
from actors.model.grammar.vocabulary import load_vocabulary
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.structured import KINDS, compiled

CheckpointOf = Callable[[str], Path]
NUM_WORDS = -(-VOCAB_SIZE // 32)


class Form:
    """The regular expression of KINDS, [a-f]{3}(-[0-9]{2}){6}!, and a text that it allows."""

    text = "abc-01-23-45-67-89-00!"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokens = [*tokenizer.encode(self.text).ids, EOS_TOKEN_ID]
        [self.forbidden] = tokenizer.encode("z").ids

    def matcher(self) -> TokenMatcher:
        vocabulary = load_vocabulary(self._directory, VOCAB_SIZE, (EOS_TOKEN_ID,))
        grammar = compiled(self._directory, KINDS["regex"])
        return TokenMatcher(grammar, vocabulary.texts, is_json=False, max_seconds_per_token=1.0)


def filled(matcher: TokenMatcher, *drafts: int) -> list[list[int]]:
    bits = np.zeros((3 + len(drafts), NUM_WORDS), dtype=np.int32)
    matcher.fill(bits, 1, drafts)
    assert not bits[[0, -1]].any(), "rows of others stay as they are"
    rows: list[list[int]] = bits[1:-1].tolist()
    return rows


@pytest.fixture
def form(checkpoint: CheckpointOf) -> Form:
    return Form(checkpoint("llama"))


def test_a_drafted_position_allows_what_the_token_itself_would(form: Form) -> None:
    matcher, follower = form.matcher(), form.matcher()
    expected = filled(follower)
    for token_id in form.tokens[:5]:
        assert follower.accept([token_id]) is None
        expected += filled(follower)
    assert filled(matcher, *form.tokens[:5]) == expected
    assert filled(matcher) == expected[:1], "it has seen none of the drafts"
    assert matcher.accept(form.tokens) is None


def test_drafts_count_up_to_the_first_that_is_not_allowed(form: Form) -> None:
    matcher = form.matcher()
    drafts = [*form.tokens[:2], form.forbidden, *form.tokens[2:4]]
    assert matcher.count_allowed(drafts) == 2
    assert matcher.count_allowed([form.forbidden]) == 0
    assert matcher.count_allowed(form.tokens) == len(form.tokens)
    assert matcher.count_allowed([*form.tokens, 5]) == len(form.tokens)
    rows = filled(matcher, *drafts)
    assert rows[:3] == filled(matcher, *form.tokens[:2])
    assert rows[3:] == [[EVERY_TOKEN] * NUM_WORDS] * 3
    assert matcher.accept(form.tokens) is None


def test_a_mask_has_a_row_for_each_sampled_position() -> None:
    # Places 3 and 1 have grammars, 3 has two drafts; 2 has one draft and no grammar; 0 is in its prompt.
    bits = np.array([[30], [31], [32], [10]], dtype=np.int32)
    step = SchedulerOutput(
        batch=StepBatch.empty(),
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        scheduled_spec_decode_tokens={"three": [5, 6], "two": [7]},
        structured_output_request_ids={"three": 3, "one": 1},
        grammar_bitmask=bits,
    )
    mask = GrammarMask.of_step(step, np.array([1, 2, 2, 3, 3, 3]))
    assert mask is not None
    assert (mask.rows.tolist(), mask.bits[:, 0].tolist()) == ([0, 3, 4, 5], [10, 30, 31, 32])
