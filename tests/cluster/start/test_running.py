"""The start, as whoever began it waits for it: the controller may have no node, or no environment, for a while."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from rich.console import Console

from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.start.running import RunningCluster


class _Controller:
    """Its methods give their own name as Ray's reference."""

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": lambda *arguments: name})()


def _answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], object]) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: answer(reference))


def test_a_controller_that_has_no_place_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    silences = iter([True, True])

    def answer(reference: str) -> list[str]:
        if reference == "progress" and next(silences, False):
            raise TimeoutError
        return {"progress": ["loading"], "start": ["10.0.0.1:50051"]}.get(reference, [])

    _answers(monkeypatch, answer)
    said = io.StringIO()
    cluster = RunningCluster(ClusterConfig(), needs_driver=False, controller=_Controller())

    assert cluster.start(Console(file=said), threading.Event())
    assert cluster.address == "10.0.0.1:50051"
    lines = [line.partition(" s  ")[2] for line in said.getvalue().splitlines()[:2]]
    assert lines == ["waiting for a node for the controller, and its environment", "loading"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_counts_as_a_bar_and_a_log_has_them_as_lines(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [f"decode-0: capturing CUDA graphs, {index} of 2 batch sizes" for index in (1, 2)]
    answers = {"progress": [*counted, "decode-0: serving"], "start": ["10.0.0.1:50051"], "http_addresses": []}
    _answers(monkeypatch, answers.__getitem__)
    said = io.StringIO()
    cluster = RunningCluster(ClusterConfig(), needs_driver=False, controller=_Controller())

    assert cluster.start(Console(file=said, force_terminal=is_terminal, width=100), threading.Event())
    lines = [line.partition(" s  ")[2] for line in said.getvalue().splitlines() if " s  " in line]
    assert lines == ([] if is_terminal else counted) + ["decode-0: serving"]


def test_only_the_start_itself_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[list[str], bool]] = []

    def wait(references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        waits.append((references, timeout > 0))
        return (references if len(waits) == 3 else []), []

    answers = {"progress": [], "start": ["10.0.0.1:50051"], "http_addresses": []}
    _answers(monkeypatch, answers.__getitem__)
    monkeypatch.setattr(ray, "wait", wait)
    cluster = RunningCluster(ClusterConfig(), needs_driver=False, controller=_Controller())

    assert cluster.start(Console(file=io.StringIO()), threading.Event())
    assert waits == [(["start"], True)] * 3


def test_a_controller_that_never_has_a_place_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(reference: str) -> object:
        raise TimeoutError

    _answers(monkeypatch, answer)
    settings = {"start_timeout_s": 1e-9, "controller": {"labels": {"zone": "x"}}}
    cluster = RunningCluster(ClusterConfig.model_validate(settings), needs_driver=False, controller=_Controller())

    with pytest.raises(
        CannotStart, match=r"the controller has not answered for .* it needs \{\} on a node .*'zone': 'x'"
    ):
        cluster.start(Console(file=io.StringIO()), threading.Event())
