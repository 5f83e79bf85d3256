"""Batch sizes of graphs: those of the settings, or vLLM's, and the smallest that holds a batch."""

from __future__ import annotations

import pytest

from actors.model.graphs.capture_sizes import capture_sizes, smallest_that_holds


@pytest.mark.parametrize(
    ("configured", "max_num_seqs", "sizes"),
    [
        (None, 1, (1,)),
        (None, 3, (1, 2, 3)),
        (None, 20, (1, 2, 4, 8, 16, 20)),
        (None, 24, (1, 2, 4, 8, 16, 24)),
        ((8, 1, 8, 64), 16, (1, 8)),
        ((64,), 16, ()),
        ((), 16, ()),
    ],
)
def test_no_size_is_larger_than_the_largest_batch(
    configured: tuple[int, ...] | None, max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    assert capture_sizes(configured, max_num_seqs) == sizes


def test_batches_of_more_than_256_requests_are_not_captured_by_default() -> None:
    sizes = capture_sizes(None, 1000)
    assert (sizes[:5], sizes[-1], len(sizes)) == ((1, 2, 4, 8, 16), 256, 35)


def test_a_batch_is_filled_up_to_the_next_size() -> None:
    sizes = (1, 2, 8)
    assert [smallest_that_holds(sizes, count) for count in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]
    assert smallest_that_holds((), 1) is None
