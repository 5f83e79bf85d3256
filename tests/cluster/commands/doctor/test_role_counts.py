from __future__ import annotations

from typing import Any

import pytest

from cluster.commands.doctor.findings import Verdict
from cluster.commands.doctor.role_counts import judge_roles
from cluster.config import ClusterConfig


@pytest.mark.parametrize(
    ("settings", "verdict", "found"),
    [
        ({}, Verdict.OK, "1 prefill, 1 decode"),
        (
            {"prefill": {"count": 2}, "decode": {"count": 0}},
            Verdict.OK,
            "2 prefill: each engine does all of its requests, without handoffs",
        ),
        (
            {"prefill": {"count": 0}, "routing": {"mode": "aggregate"}},
            Verdict.OK,
            "1 decode: each engine does all of its requests, without handoffs",
        ),
        (
            {"prefill": {"count": 0}, "routing": {"mode": "disaggregate"}},
            Verdict.WARNING,
            "1 decode: no pair that could hand over, as routing.mode: disaggregate wants",
        ),
        (
            {
                "prefill": {"count": 0},
                "decode": {"count": 0},
                "both": {"count": 2},
                "routing": {"mode": "disaggregate"},
            },
            Verdict.OK,
            "2 both",
        ),
    ],
)
def test_engines_of_one_role_are_allowed_unless_pairs_are_wanted(
    settings: dict[str, Any], verdict: Verdict, found: str
) -> None:
    finding = judge_roles(ClusterConfig.model_validate(settings))
    assert (finding.verdict, finding.found) == (verdict, found)
    assert bool(finding.advice) is (verdict is Verdict.WARNING)
