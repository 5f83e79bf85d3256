"""The default of a setting is written once, in the setting's declaration; no constructor or function repeats it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from cluster.settings_reference import sections

ROOT: Final = Path(__file__).parents[1]

_OF_THE_CALL: Final = {"timeout_s", "wait_timeout_s"}
"""Settings whose names mean something else in each call."""
_BEGINNINGS: Final = ("0", "1", "0.0", "1.0", "False", "''")
"""Counters, flags and texts begin with these."""
_DEFAULT_IN_WORDS: Final = re.compile(r"default: (\d|raypd\.)", re.IGNORECASE)


@pytest.mark.parametrize("folder", ["cluster", "actors", "kv_transfer"])
def test_no_parameter_repeats_a_default_of_the_setting_with_its_name(folder: str) -> None:
    settings = _settings()
    assert [
        f"{path}: {found}" for path in _files(folder) for found in _second_defaults(path.read_text(), settings)
    ] == []


def test_no_help_repeats_the_default_of_a_setting() -> None:
    help_texts = [(path, text) for path in _files("cluster/commands") for text in _texts(path.read_text())]
    assert [f"{path}: {text}" for path, text in help_texts if _DEFAULT_IN_WORDS.search(text)] == []


def test_defaults_of_parameters_and_of_fields_are_found() -> None:
    source = (
        "class Policy:\n    max_attempts: int = 4\n    num_attempts: int = 4\n    timeout_s: float = 3.0\n"
        "def serve(a, max_waiting_tokens=4_000_000, *, b=2, engine_timeout_s: float = 3.0, max_deaths=None): ...\n"
        "def listen(host='127.0.0.1', insecure=False, use_fastokens=True, dtype='float32'): ...\n"
    )
    assert list(_second_defaults(source, _settings())) == [
        "max_attempts = 4",
        "max_waiting_tokens = 4000000",
        "engine_timeout_s = 3.0",
        "use_fastokens = True",
        "host = '127.0.0.1'",
    ]


def test_defaults_in_help_are_found() -> None:
    texts = _texts("port = Option(help='Port; 0 takes a free one. Default: 50051.')\nwarm = f'default: {WARM}'\n")
    assert [text for text in texts if _DEFAULT_IN_WORDS.search(text)] == ["Port; 0 takes a free one. Default: 50051."]


def _files(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def _second_defaults(source: str, settings: Mapping[str, set[object]]) -> Iterator[str]:
    """Yield what has a number of its own where a setting has one, or a setting's own word or flag."""
    for node in ast.walk(ast.parse(source)):
        for name, default in _defaults(node):
            value = default.value if isinstance(default, ast.Constant) else None
            is_number = type(value) in (int, float) and any(type(own) in (int, float) for own in settings.get(name, ()))
            if (is_number or value in settings.get(name, ())) and value is not None and repr(value) not in _BEGINNINGS:
                yield f"{name} = {value!r}"


def _settings() -> Mapping[str, set[object]]:
    """Return the defaults of the settings with each name."""
    found: dict[str, set[object]] = {}
    for section in sections():
        for name, field in section.model.model_fields.items():
            if type(field.default) in (int, float, bool, str) and name not in _OF_THE_CALL:
                found.setdefault(name, set()).add(field.default)
    return found


def _texts(source: str) -> list[str]:
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


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
