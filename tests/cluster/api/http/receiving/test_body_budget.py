"""Bytes of bodies are counted over all connections."""

from __future__ import annotations

import pytest

from cluster.api.http.receiving.body_budget import FREE_BYTES, BodyBudget
from cluster.errors import Overloaded


def test_what_is_small_takes_nothing() -> None:
    budget = BodyBudget(0)
    with budget.share("a") as share:
        share.add(FREE_BYTES)
        assert budget.num_bytes == 0
        with pytest.raises(Overloaded):
            share.add(1)


def test_a_share_ends_with_its_context_or_before() -> None:
    budget = BodyBudget(1000)
    with budget.share("") as share:
        share.add(FREE_BYTES + 600)
        share.add(400)
        assert budget.num_bytes == 1000
        with budget.share("") as other, pytest.raises(Overloaded, match="the limit is 1000"):
            other.add(FREE_BYTES + 1)
        share.release()
        assert budget.num_bytes == 0
    assert budget.num_bytes == 0


def test_one_token_gets_half_of_it() -> None:
    budget = BodyBudget(1000)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        first.add(FREE_BYTES + 400)
        second.add(FREE_BYTES + 100)
        with pytest.raises(Overloaded, match="token 'a'"):
            second.add(1)
        other.add(FREE_BYTES + 500)
    assert budget.num_bytes == 0
