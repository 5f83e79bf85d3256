"""The code in the documents runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[1] / "docs"


def _python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_scheduler_can_be_driven_by_hand_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = _python_blocks(_DOCS / "scheduler.md")
    assert len(block.splitlines()) <= 35
    exec(compile(block, "docs/scheduler.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "{'a': 16} ['a'] []",
        "{'a': 4, 'b': 2} ['b'] []",
        "a 0 [7] None",
        "b 0 [7] None",
        "{'a': 1, 'b': 1} [] []",
        "a 1 [7] None",
        "b 1 [7] None",
        "{'a': 1, 'b': 1} [] []",
        "a 2 [7] length",
        "b 2 [7] length",
        "{} [] ['a', 'b']",
    ]
