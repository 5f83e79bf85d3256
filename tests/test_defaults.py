"""The default of a setting is written once, in the setting's declaration; no constructor or function repeats it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from cluster.settings_reference import sections

ROOT: Final = Path(__file__).parents[1]

_OF_THE_CALL: Final = {"timeout_s", "wait_timeout_s"}
"""Settings whose names mean something else in each call."""
_BEGINNINGS: Final = {0, 1}
"""Counters begin with these."""


@pytest.mark.parametrize("folder", ["cluster", "actors", "kv_transfer"])
def test_no_parameter_with_the_name_of_a_setting_has_a_numeric_default(folder: str) -> None:
    files, settings = sorted((ROOT / folder).rglob("*.py")), _numeric_settings()
    assert [f"{path}: {found}" for path in files for found in _second_defaults(path.read_text(), settings)] == []


def test_defaults_of_parameters_and_of_fields_are_found() -> None:
    source = (
        "class Policy:\n    max_attempts: int = 4\n    num_attempts: int = 4\n    timeout_s: float = 3.0\n"
        "def serve(a, max_waiting_tokens=4_000_000, *, b=2, engine_timeout_s: float = 3.0, max_deaths=None): ...\n"
    )
    assert list(_second_defaults(source, _numeric_settings())) == [
        "max_attempts = 4",
        "max_waiting_tokens = 4000000",
        "engine_timeout_s = 3.0",
    ]


def _second_defaults(source: str, settings: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for name, default in _defaults(node):
            value = default.value if isinstance(default, ast.Constant) else None
            if name in settings and type(value) in (int, float) and value not in _BEGINNINGS:
                yield f"{name} = {value!r}"


def _numeric_settings() -> set[str]:
    fields = [item for section in sections() for item in section.model.model_fields.items()]
    return {name for name, field in fields if type(field.default) in (int, float)} - _OF_THE_CALL


def _defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        positional = [*node.args.posonlyargs, *node.args.args]
        for parameter, default in zip(reversed(positional), reversed(node.args.defaults), strict=False):
            yield parameter.arg, default
        for parameter, keyword_default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if keyword_default is not None:
                yield parameter.arg, keyword_default
    elif isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                yield field.target.id, field.value
