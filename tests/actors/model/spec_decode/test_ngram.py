"""Prompt lookup drafts what followed the longest, latest earlier occurrence of the last tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actors.model.input_batch import TokenRows
from actors.model.spec_decode.ngram import NgramProposer


class Rows:
    """The token rows of a batch, and a proposer that looks at them."""

    def __init__(self, *, lookup_min: int = 2, lookup_max: int = 3, num_rows: int = 4, max_model_len: int = 64) -> None:
        self.tokens = TokenRows(np.zeros((num_rows, max_model_len), dtype=np.int32), np.zeros(num_rows, dtype=np.int64))
        self.proposer = NgramProposer(self.tokens, lookup_min=lookup_min, lookup_max=lookup_max)
        self.epochs = np.arange(1, num_rows + 1)

    def set(self, row: int, token_ids: list[int]) -> None:
        self.tokens.token_ids[row, : len(token_ids)] = token_ids
        self.tokens.num_tokens[row] = len(token_ids)

    def propose(self, *rows: int, num_wanted: int = 4) -> list[list[int]]:
        chosen = np.array(rows)
        return self.proposer.propose(chosen, self.epochs[chosen], np.full(len(rows), num_wanted))


def expected_draft(token_ids: list[int], lookup_min: int, lookup_max: int, num_wanted: int) -> list[int]:
    """The same by looking at every place."""
    for length in range(lookup_max, lookup_min - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                longer = list(token_ids)
                for _ in range(num_wanted):
                    longer.append(longer[end + len(longer) - len(token_ids)])
                return longer[len(token_ids) :]
    return []


def test_what_followed_the_same_tokens_is_drafted() -> None:
    rows = Rows()
    rows.set(0, [5, 6, 7, 8, 9, 10, 5, 6])
    assert rows.propose(0) == [[7, 8, 9, 10]]
    assert rows.propose(0, num_wanted=2) == [[7, 8]]


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    rows = Rows()
    rows.set(0, [1, 2, 3, 70, 2, 3, 80, 9, 2, 3, 90, 1, 2, 3])
    rows.set(1, [2, 3, 70, 2, 3, 80, 9, 2, 3])
    assert rows.propose(0, 1, num_wanted=1) == [[70], [80]]


def test_a_single_equal_token_is_no_match_unless_it_is_asked_for() -> None:
    token_ids = [5, 6, 7, 5]
    for lookup_min, draft in ((2, []), (1, [6, 7])):
        rows = Rows(lookup_min=lookup_min)
        rows.set(0, token_ids)
        assert rows.propose(0, num_wanted=2) == [draft]


def test_a_loop_is_drafted_to_go_on_as_a_loop() -> None:
    rows = Rows()
    rows.set(0, [4, 9, 9, 9])
    rows.set(1, [4, 1, 2, 1, 2])
    assert rows.propose(0, 1, num_wanted=5) == [[9] * 5, [1, 2, 1, 2, 1]]


def test_too_short_a_context_and_one_without_repetition_give_no_draft() -> None:
    rows = Rows()
    rows.set(0, [5])
    rows.set(1, [0, 0])
    rows.set(2, [5, 6, 7, 8])
    assert rows.propose(0, 1, 2) == [[], [], []]


def test_tokens_that_a_rows_former_owner_left_are_not_drafted() -> None:
    rows = Rows()
    rows.set(0, [5, 6, 7, 8, 9, 5, 6, 40, 41, 42])
    rows.propose(0)
    rows.epochs[0] = 99
    rows.set(0, [5, 6, 7, 5, 6])
    assert rows.propose(0, num_wanted=3) == [[7, 5, 6]]


@pytest.mark.parametrize("max_model_len", [120, 40_000])
def test_drafts_are_those_of_a_full_search_however_tokens_come(max_model_len: int) -> None:
    chance = random.Random(max_model_len)
    rows = Rows(lookup_min=1, lookup_max=4, num_rows=3, max_model_len=max_model_len)
    contexts: dict[int, list[int]] = {row: [] for row in range(3)}
    num_equal = num_all = 0
    for step in range(150):
        for row, context in contexts.items():
            if not context or len(context) > 100:
                context[:] = chance.choices(range(6), k=chance.randint(1, 30))
                rows.epochs[row] = 10 * step + row + 10
            else:
                context.extend(chance.choices(range(6), k=chance.randint(0, 4)))
            rows.set(row, context)
        chosen = chance.sample(range(3), k=chance.randint(1, 3))
        drafts = rows.propose(*chosen, num_wanted=3)
        for row, draft in zip(chosen, drafts, strict=True):
            expected = expected_draft(contexts[row], 1, 4, 3)
            # A slot of a small table may have gone to another n-gram: then a shorter match is found, or none.
            assert draft == expected or max_model_len == 120
            num_equal += draft == expected
            num_all += 1
    assert num_equal > 0.8 * num_all
