"""The code in the documents runs, and the files and pages that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2
from tests.cluster.client.scripted_ingress import ScriptedIngress

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", _ROOT / "CHANGELOG.md", *sorted(_DOCS.glob("*.md"))]
_RECORDS = sorted((_DOCS / "decisions").glob("*.md"))
_SOURCES = ("cluster", "actors", "kv_transfer", "tests", "benchmarks", "tools")


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


def test_the_client_does_what_its_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: generate_pb2.GenerateRequest) -> str:
        return f"<{request.text or request.chat.messages[-1].content}>"

    blocks = _python_blocks(_DOCS / "client.md")
    assert len(blocks) == 3
    with ScriptedIngress(answer).serving() as ingress:
        for block in blocks:
            exec(compile(block.replace("127.0.0.1:50051", ingress.address), "docs/client.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "<Tell me>",
        "<Hello>",
        "7",
        "<Hello> <one> <two> <three>",
        "<one> -1.0 -2.0",
        "<two> -1.0 -2.0",
        "INVALID_ARGUMENT {'sampling_params.top_p': 'sampling_params.top_p is 7.0; allowed: (0, 1]'}",
        "2",
    ]
    assert [turn.role for turn in ingress.requests[1].chat.messages] == ["system", "user"]
    assert {request.sampling_params.seed for request in ingress.requests[3:6]} == {7}


def test_the_tests_that_the_page_of_attacks_names_are_there() -> None:
    root = _DOCS.parent
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (_DOCS / "attacks.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (root / path).exists() or (test and f"def {test}(" not in (root / path).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_the_client_of_the_readme_prints_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = _python_blocks(_DOCS.parent / "README.md")
    with ScriptedIngress(lambda request: f"<{request.text}>").serving() as ingress:
        exec(compile(block.replace("127.0.0.1:50051", ingress.address), "README.md", "exec"), {})
    assert capsys.readouterr().out == "<def fibonacci(n):>"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_the_source_files_that_a_page_names_are_there(page: Path) -> None:
    basenames = {path.name for folder in _SOURCES for path in (_ROOT / folder).rglob("*.py")}
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)\b", text)
    named += re.findall(r"`((?:cluster|actors|kv_transfer|tests|benchmarks)/[\w./-]*)`", text)

    def is_there(name: str) -> bool:
        return (_ROOT / name).exists() if "/" in name else name in basenames

    assert [name for name in named if not is_there(name)] == []


def _links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_links_lead_somewhere_and_every_page_is_linked() -> None:
    linked = set().union(*(_links(page) for page in (*_PAGES, *_RECORDS)))
    assert [str(target) for target in sorted(linked) if not target.exists()] == []
    assert [page.name for page in _PAGES if page.parent == _DOCS and page not in linked] == []
