"""A request keeps its drafts up to the first wrong one, and one token after them."""

from __future__ import annotations

import numpy as np

from actors.model.spec_decode.verification import StepDrafts


def test_each_request_samples_after_its_last_token_and_after_each_draft() -> None:
    drafts = StepDrafts(np.array([[7, 8], [-1, -1], [9, -1]]))
    assert (drafts.owners.tolist(), drafts.offsets.tolist()) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1])
    # Request 0 has batch places 0 to 2, request 1 place 3, request 2 places 4 and 5.
    assert drafts.positions_before(np.array([2, 3, 5])).tolist() == [0, 1, 2, 3, 4, 5]


def test_drafts_are_kept_up_to_the_first_wrong_one() -> None:
    drafts = StepDrafts(np.array([[7, 8], [7, 8], [7, 8], [-1, -1], [9, -1]]))
    sampled = np.array([7, 8, 1, 7, 3, 8, 3, 8, 5, 4, 9, 6])
    tokens, num_tokens = drafts.accept(sampled)
    assert tokens.tolist() == [[7, 8, 1], [7, 3, -1], [3, -1, -1], [4, -1, -1], [9, 6, -1]]
    assert num_tokens.tolist() == [3, 2, 1, 1, 2]
