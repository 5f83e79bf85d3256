"""A label has a bounded number of values, whatever names come."""

from __future__ import annotations

from cluster.observability.prometheus.bounded_names import BoundedNames


def test_names_beyond_the_bound_count_as_one_and_the_first_ones_keep_their_own() -> None:
    names = BoundedNames(2)
    assert [names.bounded(name) for name in ("a", "b", "c", "d", "a", "b")] == ["a", "b", "other", "other", "a", "b"]
