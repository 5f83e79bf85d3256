"""Inside an engine nothing is decided by the wall clock, which an operator or NTP may step."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_DATED_FILES = {_ROOT / "actors/costs" / name for name in ("cost_file.py", "cost_keeper.py", "engine_costs.py")}
"""They write into a file when it was saved, which its reader sees; nothing waits or ends by it."""
_FILES = [
    path
    for floor in ("actors", "kv_transfer")
    for path in sorted((_ROOT / floor).rglob("*.py"))
    if path not in _DATED_FILES
]


def _reads_wall_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("time", "time")
    )


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_the_wall_clock_is_read_only_to_turn_monotonic_times_into_unix_times(path: Path) -> None:
    tree = ast.parse(path.read_text())
    offsets = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.unparse(node.left) == "time.time()"
        for child in ast.walk(node)
    }
    wrong = [node for node in ast.walk(tree) if _reads_wall_clock(node) and node not in offsets]
    assert [f"{path.name}:{node.lineno}" for node in wrong if isinstance(node, ast.expr)] == []


def test_a_deadline_on_the_wall_clock_would_be_found() -> None:
    [found] = [node for node in ast.walk(ast.parse("deadline_s = time.time() + 1")) if _reads_wall_clock(node)]
    assert isinstance(found, ast.expr)
