"""`raypd chat` and `raypd generate`, as whoever types at them sees them.

Tests of cluster/commands/ask.py, cluster/commands/print_answer.py, cluster/commands/terminal_chat/keyboard.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2
from tests.cluster.client.scripted_ingress import ScriptedIngress
from tests.cluster.commands.terminal_chat.terminal import CTRL_D, UP, RaypdInTerminal

_TIMEOUT_S = 60.0


def _answer(request: generate_pb2.GenerateRequest) -> str:
    turns = request.chat.messages
    return f"<{len(turns)} turns, the last: {turns[-1].content!r}>" if turns else f"<{request.text}>"


@pytest.fixture
def first() -> Iterator[ScriptedIngress]:
    with ScriptedIngress(_answer).serving() as ingress:
        yield ingress


@pytest.fixture
def second() -> Iterator[ScriptedIngress]:
    with ScriptedIngress(_answer).serving() as ingress:
        yield ingress


def test_a_conversation_from_its_begin_to_its_end(
    first: ScriptedIngress, second: ScriptedIngress, tmp_path: Path
) -> None:
    addresses = f"{first.address},{second.address}"
    with RaypdInTerminal(tmp_path, "chat", "--address", addresses, "-p", "max_tokens=50") as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("<1 turns, the last: 'hello'>")
        shown = terminal.wait_for("> ")
        assert "TTFT" in shown
        assert "TPOT" in shown
        assert any("TPOT" in line and "9 tokens" in line for line in terminal.below), "live"
        if not first.requests:
            first, second = second, first  # The client had connected to that one sooner.
        assert first.requests[-1].sampling_params.max_tokens == 50

        terminal.type("/system Be brief.\n")
        terminal.wait_for("system: Be brief.")
        terminal.type("/params temperature=0.5\n")
        terminal.wait_for("params: max_tokens=50 temperature=0.5")
        terminal.type("two\\\n")
        terminal.wait_for(". ")
        terminal.type("lines\n")
        terminal.wait_for(r"<4 turns, the last: 'two\nlines'>")
        assert first.requests[-1].sampling_params.temperature == 0.5
        terminal.wait_for("> ")

        _an_answer_is_stopped(terminal, first)
        _an_ingress_dies(terminal, first, second)

        terminal.type("half a tho")
        terminal.wait_for("half a tho")
        terminal.press_ctrl_c()
        terminal.wait_for("(Ctrl-D or /exit leaves)")
        terminal.wait_for("> ")
        terminal.type(UP)
        terminal.wait_for("go on")
        terminal.type("\n")
        terminal.wait_for("the last: 'go on'>")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    history = tmp_path / "raypd" / "chat_history"
    assert "two\\" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0


def _an_answer_is_stopped(terminal: RaypdInTerminal, ingress: ScriptedIngress) -> None:
    ingress.hold_after = 5
    terminal.type("wait\n")
    assert ingress.is_held.wait(_TIMEOUT_S)
    terminal.wait_for("<6 tu")
    terminal.press_ctrl_c()
    terminal.wait_for("5 tokens · stopped")
    assert ingress.has_aborted.wait(_TIMEOUT_S)
    terminal.wait_for("> ")
    ingress.is_held.clear()


def _an_ingress_dies(terminal: RaypdInTerminal, first: ScriptedIngress, second: ScriptedIngress) -> None:
    terminal.type("go on\n")
    assert first.is_held.wait(_TIMEOUT_S)
    terminal.wait_for("<8 tu")  # What was written but not read yet would be lost with the ingress.
    first.kill()
    terminal.wait_for("the last: 'go on'>")
    terminal.wait_for("> ")
    [resumed] = second.requests
    assert bytes(resumed.output_token_ids) == b"<8 tu"
    assert [turn.content for turn in resumed.chat.messages][-2:] == ["<6 tu", "go on"], "what there was of the answer"


def test_what_cannot_be_answered_does_not_end_the_chat(tmp_path: Path) -> None:
    with RaypdInTerminal(tmp_path, "chat", "--address", "127.0.0.1:1", "--history", "/dev/null") as terminal:
        terminal.wait_for("> ")
        terminal.type('"""\na\nb"""\n')
        terminal.wait_for("no token yet · UNAVAILABLE")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.wait_for_end() == 0
    assert not (tmp_path / "raypd").exists()


def test_an_answer_is_written_to_a_pipe(first: ScriptedIngress) -> None:
    command = [sys.executable, "-m", "cluster", "generate", "-", "--address", first.address, "--ttft-ms", "250"]
    done = subprocess.run(
        [*command, "--times", "-p", "top_k=3", "-p", "stop=END"],
        input="hi",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "<hi>\n")
    assert "TTFT" in done.stderr
    [request] = first.requests
    assert (request.sampling_params.top_k, list(request.sampling_params.stop)) == (3, ["END"])
