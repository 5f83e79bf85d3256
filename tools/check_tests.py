"""Hold that the tests of every module can be found from its name, or from the module's path in the tests' docstrings.

The tests of cluster/text/detokenizer.py are in tests/cluster/text/test_detokenizer.py, or in a file there that begins
so. Another file of tests names the modules that it tests at the end of its docstring, so that `git grep` finds it:

    Tests of cluster/text/fast_encoder.py, cluster/text/tokenizing.py.

Modules that only import from others, and generated ones, need no tests.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("cluster", "actors", "kv_transfer")

_GENERATED: Final = re.compile(r"_pb2(_grpc)?\.py$")
_PATH: Final = r"[\w/]+\.py"
_TESTS_OF: Final = re.compile(rf"Tests of ({_PATH}(?:(?:,\s+(?:and\s+)?|\s+and\s+){_PATH})*)\.(?:\s|$)")


def main() -> int:
    """Print what is wrong; returns the exit status."""
    named = named_modules()
    problems = [
        f"{test}: names {module}, which does not exist"
        for module, tests in sorted(named.items())
        for test in tests
        if not (ROOT / module).is_file()
    ]
    problems += [
        f"{module}: no tests by its name: call them {mirror(module)}, or end their docstring with `Tests of {module}.`"
        for module in modules()
        if module not in named and not is_mirrored(module)
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def modules() -> Iterator[str]:
    """Yield the path of each module that has to have tests."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not _GENERATED.search(path.name) and not _only_imports(path):
                yield path.relative_to(ROOT).as_posix()


def mirror(module: str) -> str:
    """Return the path at which the tests of a module are found by its name."""
    folder, _, name = module.rpartition("/")
    return f"tests/{folder}/test_{name}"


def is_mirrored(module: str) -> bool:
    """Whether there is a file of tests at the module's place, or one that begins with its name."""
    path = ROOT / mirror(module)
    return path.is_file() or any(path.parent.glob(f"{path.stem}_*.py"))


def named_modules() -> dict[str, list[str]]:
    """Return for each module that tests name, or for what they take for one, the files of these tests."""
    named: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        for match in _TESTS_OF.finditer(docstring):
            for module in re.findall(_PATH, match[1]):
                named.setdefault(module, []).append(path.relative_to(ROOT).as_posix())
    return named


def _only_imports(path: Path) -> bool:
    """Whether a module has a docstring and imports only, and perhaps a list of what it exports."""
    return all(
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"])
        for node in ast.parse(path.read_text("utf-8")).body
    )


if __name__ == "__main__":
    sys.exit(main())
