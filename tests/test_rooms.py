"""The sizes that CONTRIBUTING.md allows, names of modules that mean one thing each, and no circle of imports."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
FLOORS: Final = ("cluster", "actors", "kv_transfer")

_MAX_LINES: Final = 400
_MAX_FUNCTION_LINES: Final = 60
_MAX_FILES: Final = 15
_GENERATED: Final = ("_pb2", "_pb2_grpc")
_SAME_ON_EACH_FLOOR: Final = {"__init__", "base", "config", "errors", "server"}
"""Modules with one of these names mean the same: the interface, the settings, the errors, the server of an API."""
_LONG_FUNCTIONS: Final = ("cluster/commands/", "actors/model/attention/triton_kernels/")
"""A command's function declares its options, and a kernel of a GPU is one function, which is many lines."""


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {name: len(source.splitlines()) for name, source in _sources().items()}
    assert {name: length for name, length in lengths.items() if length > _MAX_LINES} == {}


def test_no_folder_has_more_than_fifteen_files() -> None:
    num_files = Counter(name.rpartition("/")[0] for name in _sources() if not name.endswith("/__init__.py"))
    assert {folder: num for folder, num in num_files.items() if num > _MAX_FILES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    sources = {name: source for name, source in _sources().items() if not name.startswith(_LONG_FUNCTIONS)}
    assert [f"{name}: {found}" for name, source in sources.items() for found in _long_functions(source)] == []


def test_no_two_modules_have_the_same_name() -> None:
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for name, source in _sources().items():
        if Path(name).stem not in _SAME_ON_EACH_FLOOR and not _only_imports(source):
            folders[Path(name).name].append(name)
    assert [names for names in folders.values() if len(names) > 1] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert _circle({_module(name): source for name, source in _sources().items()}) == []


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a": "import b", "b": "from c import d", "c.d": "import a"}, ["a", "b", "c.d"]),
        ({"a": "import b", "b": "if TYPE_CHECKING:\n    import a"}, []),
        ({"a": "import b", "b": "def later():\n    import a"}, []),
    ],
)
def test_a_circle_is_found(sources: dict[str, str], circle: list[str]) -> None:
    assert sorted(set(_circle(sources))) == circle


def test_long_functions_are_found() -> None:
    body = "    pass\n" * _MAX_FUNCTION_LINES
    source = f"def short():\n{body[9:]}\nclass A:\n  async def long(self):\n{body}"
    assert list(_long_functions(source)) == ["long has 61 lines"]


@functools.cache
def _sources() -> dict[str, str]:
    """Return the text of every module that is not generated, by its path."""
    paths = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if not path.stem.endswith(_GENERATED)}


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _only_imports(source: str) -> bool:
    """Whether a module has nothing of its own, as a module's former name has."""
    return all(isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) for node in ast.parse(source).body)


def _long_functions(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > _MAX_FUNCTION_LINES:
                yield f"{node.name} has {num_lines} lines"


def _circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other in a circle when they are imported; an empty list if none do."""
    imports = {module: set(_imported(source, sources)) - {module} for module, source in sources.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _imported(source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that a module imports at once, when it is imported itself."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules or node.module in modules:
                    yield name if name in modules else node.module
