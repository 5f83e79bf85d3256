from __future__ import annotations

import json

import aiohttp
import pytest

from cluster.bench.prompts import Vocabulary
from cluster.bench.server import ServedModel, Target, ask_vocabulary, base_url_of, find_model
from cluster.errors import CannotMeasure, InvalidConfig
from tests.cluster.bench.scripted_server import Answer, ScriptedServer, models, scripted_server, tokenized


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("https://example.org/v1/", "https://example.org/v1"),
        ("example.org:80/api", "http://example.org:80/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_a_url_is_completed(url: str, base_url: str) -> None:
    assert base_url_of(url) == base_url


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a?x=1", "http://[a"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="is no URL of a server"):
        base_url_of(url)


async def _find(server: ScriptedServer, name: str | None) -> ServedModel:
    async with aiohttp.ClientSession() as session:
        return await find_model(session, Target(server.url, {}), name)


async def test_the_first_model_that_is_no_adapter_is_taken() -> None:
    async with scripted_server({"/v1/models": [models("tiny", max_model_len=64)]}) as server:
        assert await _find(server, None) == ServedModel("tiny", 64)
        assert (await _find(server, "adapter")).parent == "tiny"


async def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    async with scripted_server({"/v1/models": [models("tiny")]}) as server:
        with pytest.raises(InvalidConfig, match="serves adapter, tiny, and not 'other'"):
            await _find(server, "other")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([b'{"data": []}']), "serves no model"),
        (Answer([b"no key"], 401), "was answered by 401: no key"),
        (Answer([b"<html>"]), "was answered by something else"),
    ],
)
async def test_an_answer_that_lists_no_model_says_why_nothing_can_be_measured(answer: Answer, message: str) -> None:
    async with scripted_server({"/v1/models": [answer]}) as server:
        with pytest.raises(CannotMeasure, match=message):
            await _find(server, None)


async def test_a_server_that_does_not_listen_is_named() -> None:
    async with scripted_server({}) as server:
        pass
    with pytest.raises(CannotMeasure, match=r"GET http://127.0.0.1:\d+/v1/models failed"):
        await _find(server, None)


async def _ask(server: ScriptedServer) -> Vocabulary:
    async with aiohttp.ClientSession() as session:
        return await ask_vocabulary(session, Target(server.url, {}), "tiny")


async def test_the_vocabulary_is_that_of_a_tokenized_text() -> None:
    async with scripted_server({"/tokenize": [tokenized(20)]}) as server:
        vocabulary = await _ask(server)
    assert list(vocabulary.token_ids) == list(range(20))
    assert vocabulary.words[:2] == ["wa", "wb"]
    [body] = server.bodies["/tokenize"]
    assert (body["model"], body["add_special_tokens"]) == ("tiny", False)


async def test_a_server_that_does_not_tokenize_needs_a_tokenizer_beside_it() -> None:
    async with scripted_server({"/tokenize": [Answer([b"{}"], 404)]}) as server:
        with pytest.raises(InvalidConfig, match="--tokenizer: name the folder of the model's tokenizer"):
            await _ask(server)


async def test_too_few_tokens_are_no_vocabulary() -> None:
    few = Answer([json.dumps({"tokens": [1, 2, 2]}).encode()])
    async with scripted_server({"/tokenize": [few]}) as server:
        with pytest.raises(InvalidConfig, match="it gives 2 tokens"):
            await _ask(server)
