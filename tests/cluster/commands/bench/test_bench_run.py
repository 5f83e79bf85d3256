"""`raypd bench` at servers that answer at once. The figures' values are those of tests/cluster/bench.

Tests of cluster/commands/bench/bench_command.py.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client.client_credentials import Credentials
from cluster.commands.bench.bench_options import BenchOptions, check
from cluster.commands.bench.bench_run import run_benchmark
from cluster.errors import CannotMeasure, InvalidConfig
from tests.cluster.bench.scripted_server import (
    DONE,
    Answer,
    chat_event,
    models,
    scripted_server,
    text_event,
    tokenized,
    usage_event,
)

WHOLE = Answer([text_event("a"), text_event("b"), text_event("c", "length"), usage_event(8, 3), DONE])
CHAT = Answer([chat_event(role="assistant"), chat_event("length", content="a"), usage_event(8, 1), DONE])


def _answers(*completions: Answer, **fields: int) -> dict[str, list[Answer]]:
    return {
        "/v1/models": [models("tiny", **fields)],
        "/tokenize": [tokenized(20)],
        "/v1/completions": list(completions or [WHOLE]),
        "/v1/chat/completions": [CHAT],
    }


async def _run(*urls: str, credentials: Credentials | None = None, token: str = "", **options: Any) -> str:
    given = BenchOptions(**{"urls": urls, "num_prompts": 4, "input_len": 8, "output_len": 3, "seed": 1, **options})
    written = io.StringIO()
    console = Console(file=written, width=150)
    await run_benchmark(check(given), credentials or Credentials(), token, console)
    return written.getvalue()


async def test_a_run_prints_figures_and_definitions_and_writes_them(tmp_path: Path) -> None:
    async with scripted_server(_answers()) as server:
        shown = await _run(server.url, json_file=tmp_path / "out.json", slo=["e2el=60s"], num_warmups=2)
    for part in (
        "model tiny",
        "seed 1",
        "Successful requests:",
        "TTFT",
        "Time to first token",
        "Goodput",
        "written to",
    ):
        assert part in shown
    assert "no usage" not in shown
    assert "another length" not in shown
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["completed"], run["failed"], run["total_output_tokens"], run["goodput"]["num_good"]) == (4, 0, 12, 4)
    bodies = server.bodies["/v1/completions"]
    assert len(bodies) == 2 + 4, "the warm-up is in no figure"
    assert len({tuple(body["prompt"]) for body in bodies}) == 6, "no prompt is in the server's cache"


async def test_a_chat_is_measured_with_words() -> None:
    async with scripted_server(_answers()) as server:
        await _run(server.url, chat=True, num_warmups=0)
    contents = [body["messages"][0]["content"] for body in server.bodies["/v1/chat/completions"]]
    assert [len(content.split()) for content in contents] == [8] * 4


async def test_two_servers_are_measured_in_turns_with_the_same_prompts(tmp_path: Path) -> None:
    async with scripted_server(_answers()) as one, scripted_server(_answers()) as other:
        shown = await _run(one.url, other.url, num_warmups=0, html_file=tmp_path / "out.html", headers=["x-key=secret"])
    assert "5 pairs, medians" in shown
    page = (tmp_path / "out.html").read_text()
    assert page.count("<details>") == 10
    assert "secret" not in page, "headers may contain tokens"
    assert "output tok/s" in shown
    prompts = [[body["prompt"] for body in server.bodies["/v1/completions"]] for server in (one, other)]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts[0]}) == 20, "each pair has prompts of its own"


async def test_failed_requests_are_counted_and_the_others_measured(tmp_path: Path) -> None:
    refused = Answer([b'{"error": "full"}'], 429)
    async with scripted_server(_answers(WHOLE, refused, WHOLE)) as server:
        shown = await _run(server.url, json_file=tmp_path / "out.json")
    assert "HTTP 429" in shown
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["completed"], run["failed"]) == (3, 1)


async def test_a_run_without_a_whole_answer_is_an_error_after_its_figures(tmp_path: Path) -> None:
    async with scripted_server(_answers(Answer([b"full"], 429))) as server:
        with pytest.raises(CannotMeasure, match="A: none of 4 requests was answered whole: HTTP 429"):
            await _run(server.url, json_file=tmp_path / "out.json", num_warmups=0)
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["failed"] == 4


async def test_a_warm_up_that_fails_ends_the_benchmark() -> None:
    async with scripted_server(_answers(Answer([b"no"], 400))) as server:
        with pytest.raises(CannotMeasure, match=r"a warm-up request to .* failed: HTTP 400: no"):
            await _run(server.url)
    assert len(server.bodies["/v1/completions"]) == 1


async def test_requests_that_the_context_does_not_hold_are_refused_before_anything_is_sent() -> None:
    async with scripted_server(_answers(max_model_len=12)) as server:
        with pytest.raises(
            InvalidConfig, match=r"4 of 4 requests are longer than 12 tokens, the context of tiny; .* 13"
        ):
            await _run(server.url, prefix_len=2)
        with pytest.raises(InvalidConfig, match=r"40 of 40 requests are longer"):
            await _run(server.url, server.url, num_pairs=10, prefix_len=2)
    assert "/v1/completions" not in server.bodies


async def test_a_chat_needs_words_of_one_token() -> None:
    answers = _answers() | {"/tokenize": [Answer([json.dumps({"tokens": list(range(20))}).encode()])]}
    async with scripted_server(answers) as server:
        with pytest.raises(InvalidConfig, match="no words of one token"):
            await _run(server.url, chat=True)


async def test_every_call_carries_the_token() -> None:
    async with scripted_server(_answers()) as server:
        await _run(server.url, token="spare", headers=["x-a=b"])
        await _run(server.url, token="spare", credentials=Credentials(token="own"))
    assert [one["authorization"] for one in server.headers] == ["Bearer spare"] * 7 + ["Bearer own"] * 7
    assert all(one["x-a"] == "b" for one in server.headers[:7])


async def test_a_token_goes_to_other_hosts_only_over_tls() -> None:
    with pytest.raises(InvalidConfig, match=r"the token would go to example\.org in plain text"):
        await _run("http://example.org:8000", token="secret")


async def test_authorities_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--tls-ca, --tls-cert: they cannot be used"):
        await _run("https://127.0.0.1:1", credentials=Credentials(ca=tmp_path / "missing"))


def test_the_command_names_mistakes_and_sends_nothing() -> None:
    result = CliRunner().invoke(app, ["bench", "--request-rate", "0", "--slo", "x"])
    assert result.exit_code == 2
    assert "--request-rate must be above 0" in result.output
    assert "'x' is not" in result.output


def test_the_command_says_that_nothing_listens() -> None:
    result = CliRunner().invoke(app, ["bench", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "GET http://127.0.0.1:1/v1/models failed" in result.output
