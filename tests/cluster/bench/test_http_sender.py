"""The client against a server whose events come at known times."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import pytest

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.http_sender import Api, CallForm, HttpSender
from cluster.bench.prompts import PromptSource, Vocabulary
from cluster.bench.record import RequestRecord
from cluster.bench.server import Target
from tests.cluster.bench.scripted_server import (
    DONE,
    Answer,
    At,
    HangUp,
    SayNothing,
    ScriptedClock,
    ScriptedServer,
    Step,
    chat_event,
    scripted_server,
    text_event,
    usage_event,
)

PROMPTS = PromptSource(Vocabulary(range(100), ["one", "two"]), seed=1)
REQUEST = PlannedRequest(0, 0.0, num_input_tokens=5, num_output_tokens=3)
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


async def _sent_to(server: ScriptedServer, form: CallForm, timeout_s: float = 60.0) -> RequestRecord:
    async with aiohttp.ClientSession() as session:
        target = Target(server.url, {"authorization": "Bearer t"})
        sender = HttpSender(session, target, form, PROMPTS, timeout_s=timeout_s, clock=server.clock)
        record = RequestRecord(REQUEST, arrival_s=0.0)
        await sender.prepare(REQUEST)(record)
    return record


async def _answered(steps: Sequence[Step], api: Api = "completions", status: int = 200) -> RequestRecord:
    clock = ScriptedClock()
    clock.move_to(10.0)
    async with scripted_server({PATHS[api]: [Answer(steps, status)]}, clock) as server:
        return await _sent_to(server, CallForm("tiny", api))


async def test_every_figure_is_exact() -> None:
    steps = [
        At(10.5, text_event("a")),
        At(10.75, text_event("")),  # a token whose text is held back
        At(12.0, text_event("bc", "length")),
        At(13.0, usage_event(5, 3) + DONE),
    ]
    record = await _answered(steps)
    assert (record.error, record.sent_s, record.num_events) == (None, 10.0, 3)
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.longest_gap_s) == (0.5, 2.0, 0.75, 1.25)
    assert record.gaps_s is not None
    assert list(record.gaps_s) == [0.25, 1.25]
    assert (record.num_input_tokens, record.num_output_tokens) == (5, 3)


async def test_tokens_are_counted_by_the_server_where_events_have_several() -> None:
    record = await _answered(
        [At(11.0, text_event("abc")), At(12.0, text_event("de", "length")), usage_event(5, 9), DONE]
    )
    assert (record.num_events, record.num_tokens, record.tpot_s) == (2, 9, 0.125)


async def test_events_of_one_read_have_the_same_time() -> None:
    record = await _answered([At(11.0, text_event("a") + text_event("b")), At(12.0, text_event("c", "stop")), DONE])
    assert list(record.gaps_s or ()) == [0.0, 1.0]


async def test_without_usage_events_are_counted() -> None:
    record = await _answered([At(11.0, text_event("a")), At(12.0, text_event("b", "stop")), DONE])
    assert (record.num_output_tokens, record.num_tokens) == (None, 2)


async def test_the_usage_of_the_last_event_counts_where_each_has_one() -> None:
    growing = text_event("a").replace(b'"usage": null', b'"usage": {"prompt_tokens": 5, "completion_tokens": 1}')
    record = await _answered([At(11.0, growing), At(12.0, text_event("b", "stop")), usage_event(5, 2), DONE])
    assert (record.num_input_tokens, record.num_tokens) == (5, 2)


async def test_the_role_of_a_chat_is_no_token() -> None:
    steps: list[Step] = [
        At(10.25, chat_event(role="assistant", content="")),
        At(10.5, chat_event(content="")),
        At(11.0, chat_event(content="a")),
        At(11.5, chat_event()),  # a token that a parser of tool calls holds back
        At(13.5, chat_event("stop", content="b")),
        usage_event(8, 4) + DONE,
    ]
    record = await _answered(steps, "chat")
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.num_events) == (0.5, 3.5, 1.0, 4)


async def test_the_end_of_a_chat_is_no_token_when_the_last_one_came_with_it() -> None:
    begin = At(10.5, chat_event(role="assistant", content="") + chat_event(content="a"))
    record = await _answered([begin, At(11.0, chat_event(content="b") + chat_event("length")), DONE], "chat")
    assert list(record.gaps_s or ()) == [0.5]
    record = await _answered([begin, At(11.0, chat_event("stop")), DONE], "chat")
    assert list(record.gaps_s or ()) == [0.5], "the token that ended the answer has no text"


async def test_comments_are_no_events() -> None:
    record = await _answered([At(10.5, b": keep-alive\n\n"), At(11.0, text_event("a", "stop")), DONE])
    assert (record.ttft_s, record.num_events) == (1.0, 1)


@pytest.mark.parametrize(
    ("steps", "status", "kind", "detail"),
    [
        ([b'{"error":\n "busy"}'], 429, "HTTP 429", '{"error": "busy"}'),
        ([], 500, "HTTP 500", ""),
        ([text_event("a"), HangUp()], 200, "connection lost", "ClientPayloadError"),
        ([text_event("a")], 200, "cut off", "without [DONE]"),
        ([usage_event(5, 0), DONE], 200, "no token", "no event with a token"),
        ([b'data: {"error": {"message": "lost"}}\n\n'], 200, "error in the stream", "lost"),
        ([b"data: nonsense\n\n"], 200, "not an event", "DecodeError"),
    ],
)
async def test_a_failure_has_its_kind(steps: list[Step], status: int, kind: str, detail: str) -> None:
    record = await _answered(steps, status=status)
    assert record.error == kind
    assert detail in record.detail
    assert not record.is_complete


async def test_an_answer_that_takes_too_long_has_failed() -> None:
    async with scripted_server({"/v1/completions": [Answer([text_event("a"), SayNothing()])]}) as server:
        record = await _sent_to(server, CallForm("tiny"), timeout_s=0.1)
    assert (record.error, record.detail) == ("timeout", "the answer took longer than 0.1 s")


async def test_a_server_that_is_not_there_is_told_from_one_that_hangs_up() -> None:
    async with scripted_server({}) as server:
        pass
    assert (await _sent_to(server, CallForm("tiny"))).error == "cannot connect"


async def test_calls_ask_for_exact_lengths_and_usage() -> None:
    answers = {path: [Answer([text_event("a", "stop"), DONE])] for path in PATHS.values()}
    async with scripted_server(answers) as server:
        await _sent_to(server, CallForm("tiny", "completions", {"ignore_eos": True, "temperature": 0.5}))
        await _sent_to(server, CallForm("tiny", "chat"))
    common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    prompt = PROMPTS.token_ids(REQUEST)
    assert server.bodies["/v1/completions"] == [
        {**common, "prompt": prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0.5}
    ]
    messages = [{"role": "user", "content": PROMPTS.text(REQUEST)}]
    assert server.bodies["/v1/chat/completions"] == [{**common, "messages": messages, "max_completion_tokens": 3}]
    assert {one["authorization"] for one in server.headers} == {"Bearer t"}
