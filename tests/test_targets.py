"""`make test-all` runs every test once, but for those that look for what is rare for hours, and those of a GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Final

MARKERS: Final = ("more", "alone", "slow", "long", "gpu")
_MAKEFILE: Final = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")


def targets_of_all() -> set[str]:
    """The targets of `make test-all`, and those that they call at their ends."""
    [needed] = re.findall(r"^test-all: (test .*?) ##", _MAKEFILE, re.MULTILINE)
    return {*needed.split(), "test-alone"}


def expression_of(target: str) -> str | None:
    """The expression by which a target selects tests; None if it runs none."""
    [recipe] = re.findall(rf"^{target}: .*\n((?:\t.*\n)+)", _MAKEFILE, re.MULTILINE)
    found = re.search(r'-m "([^"]*)"', recipe)
    return found and found[1]


def test_every_test_is_in_one_target_of_all() -> None:
    expressions = {target: found for target in targets_of_all() if (found := expression_of(target)) is not None}
    assert set(expressions) == {"test", "test-more", "test-alone", "test-slow"}
    for marks in itertools.product((False, True), repeat=len(MARKERS)):
        has = dict(zip(MARKERS, marks, strict=True))
        taken_by = [target for target, expression in expressions.items() if eval(expression, {}, has)]
        assert len(taken_by) == (0 if has["long"] or has["gpu"] else 1), (has, taken_by)


def test_what_all_leaves_out_has_a_target() -> None:
    expression = expression_of("slow")
    assert expression is not None
    assert eval(expression, {}, dict.fromkeys(MARKERS, False) | {"long": True})


def test_more_ends_with_what_runs_alone() -> None:
    [recipe] = re.findall(r"^test-more: .*\n((?:\t.*\n)+)", _MAKEFILE, re.MULTILINE)
    assert "$(MAKE) --no-print-directory test-alone" in recipe
