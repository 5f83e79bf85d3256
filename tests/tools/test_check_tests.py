from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_tests
from tools.check_tests import main, modules, named_modules

MODULE = "def f() -> None: ..."


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree."""
    monkeypatch.setattr(check_tests, "ROOT", tmp_path)
    return tmp_path


def write(root: Path, path: str, source: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(source)


@pytest.mark.parametrize("name", ["test_some.py", "test_some_properties.py"])
def test_tests_are_found_by_the_modules_name(root: Path, name: str) -> None:
    write(root, "cluster/text/some.py", MODULE)
    write(root, f"tests/cluster/text/{name}", "")
    assert main() == 0


@pytest.mark.parametrize("path", ["tests/cluster/test_some.py", "tests/cluster/text/test_something.py"])
def test_tests_elsewhere_are_not_found_by_the_name(root: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "cluster/text/some.py", MODULE)
    write(root, path, '"""The tests of some."""')
    assert main() == 1
    assert capsys.readouterr().out == (
        "cluster/text/some.py: no tests by its name: call them tests/cluster/text/test_some.py, or end their docstring "
        "with `Tests of cluster/text/some.py.`\n"
    )


@pytest.mark.parametrize(
    "docstring",
    [
        "Tests of actors/a.py, actors/b.py.",
        "Tests of actors/a.py and actors/b.py.",
        "It works.\n\nTests of actors/a.py,\nactors/b.py.",
        "It works. Tests of actors/a.py,\nand actors/b.py.\n",
    ],
)
def test_tests_are_found_by_the_modules_that_their_docstring_names(root: Path, docstring: str) -> None:
    write(root, "actors/a.py", MODULE)
    write(root, "actors/b.py", MODULE)
    write(root, "tests/test_both.py", f'"""{docstring}"""')
    assert named_modules() == {"actors/a.py": ["tests/test_both.py"], "actors/b.py": ["tests/test_both.py"]}
    assert main() == 0


def test_a_module_that_is_named_and_does_not_exist_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "tests/test_a.py", '"""Tests of actors/gone.py."""')
    assert main() == 1
    assert capsys.readouterr().out == "tests/test_a.py: names actors/gone.py, which does not exist\n"


def test_modules_that_only_import_and_generated_ones_need_no_tests(root: Path) -> None:
    write(root, "kv_transfer/__init__.py", '"""The floor."""')
    write(root, "kv_transfer/former.py", '"""Its former name."""\n\nfrom kv_transfer.new import f\n\n__all__ = ["f"]')
    write(root, "kv_transfer/some_pb2.py", MODULE)
    write(root, "kv_transfer/new.py", MODULE)
    assert list(modules()) == ["kv_transfer/new.py"]
