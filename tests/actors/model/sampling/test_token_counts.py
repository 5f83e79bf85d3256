from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.model.sampling.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 30), max_size=200)


def as_dict(found: tuple[np.ndarray, np.ndarray]) -> dict[int, int]:
    token_ids, counts = found
    assert len(set(token_ids.tolist())) == len(token_ids) == len(counts)
    return dict(zip(token_ids.tolist(), counts.tolist(), strict=True))


def counted(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {token_id: output.count(token_id) for token_id in {*prompt, *output}}


@given(TOKENS, st.lists(TOKENS, max_size=4), TOKENS)
def test_counts_grow_with_the_output_and_drafts_leave_no_trace(
    prompt: list[int], parts: list[list[int]], drafts: list[int]
) -> None:
    counts = TokenCounts(np.array(prompt, dtype=np.int32))
    output: list[int] = []
    for part in parts:
        counts.count(np.array(part, dtype=np.int32))
        output += part
        assert as_dict(counts.with_drafts(np.array(drafts, dtype=np.int32))) == counted(prompt, output + drafts)
        assert as_dict(counts.with_drafts(np.zeros(0, dtype=np.int32))) == counted(prompt, output)
        assert counts.num_counted == len(output)


def test_many_distinct_tokens_find_room() -> None:
    counts = TokenCounts(np.zeros(0, dtype=np.int32))
    for token_id in range(1000):
        counts.count(np.array([token_id, 7]))
    assert as_dict(counts.with_drafts(np.array([2000]))) == {**dict.fromkeys(range(1000), 1), 7: 1001, 2000: 1}
