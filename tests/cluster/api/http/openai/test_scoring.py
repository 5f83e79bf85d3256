"""/classify, /score and /rerank as vLLM has them.

Tests of cluster/api/http/openai/embeddings.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.request import EngineCoreRequest, FinishReason
from tests.cluster.api.http.http_setup import Setup, http_setup
from tests.cluster.serving_setup import assert_nothing_is_left

EMBEDS = PoolingFacts(embedding_size=2)
CLASSIFIES = PoolingFacts(labels=("bad", "good"), activation="softmax")
SCORES = PoolingFacts(labels=("relevance",), activation="sigmoid")


async def _asked(
    setup: Setup, path: str, body: dict[str, Any], vectors: list[list[float]]
) -> tuple[dict[str, Any], list[EngineCoreRequest]]:
    """The answer, if the engine has these vectors, and what the engine was asked."""
    asking = asyncio.create_task(setup.http.post(path, json=body))
    requests = []
    for vector in vectors:
        request = await setup.pair.prefill.next_request()
        setup.pair.prefill.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=vector)
        requests.append(request)
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert_nothing_is_left(setup.pair)
    body = answer.json()
    assert answer.headers["x-request-id"] == body.pop("id")
    body.pop("created", None)
    return body, requests


async def test_classes_have_probabilities_and_a_name() -> None:
    async with http_setup(pooling=CLASSIFIES) as setup:
        body = {"model": "tiny", "input": ["one", "three"], "priority": 3, "request_id": "mine"}
        answer, requests = await _asked(setup, "/classify", body, [[0.25, 0.75], [0.5, 0.5]])
    assert answer == {
        "object": "list",
        "model": "tiny",
        "data": [
            {"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "bad", "probs": [0.5, 0.5], "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    assert [bytes(request.prompt_token_ids) for request in requests] == [b"one", b"three"]
    assert {request.priority for request in requests} == {3}


@pytest.mark.parametrize("name", ["activation", "use_activation"])
async def test_classes_can_be_logits(name: str) -> None:
    async with http_setup(pooling=CLASSIFIES) as setup:
        answer, [request] = await _asked(setup, "/classify", {"input": "one", name: False}, [[-1.5, 2.0]])
    assert answer["data"][0]["probs"] == [-1.5, 2.0]
    assert request.pooling_params is not None
    assert not request.pooling_params.activate


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("text_1", ["what", ["what"]])
async def test_a_query_is_scored_with_each_document(path: str, text_1: str | list[str]) -> None:
    async with http_setup(pooling=SCORES) as setup:
        body = {"model": "tiny", "text_1": text_1, "text_2": ["that", "this"]}
        answer, requests = await _asked(setup, path, body, [[0.25], [0.75]])
    assert answer == {
        "object": "list",
        "model": "tiny",
        "data": [{"index": 0, "object": "score", "score": 0.25}, {"index": 1, "object": "score", "score": 0.75}],
        "usage": {"prompt_tokens": 16, "total_tokens": 16},
    }
    assert [bytes(request.prompt_token_ids) for request in requests] == [b"whatthat", b"whatthis"]


async def test_as_many_queries_as_documents_are_pairs() -> None:
    async with http_setup(pooling=SCORES) as setup:
        body = {"text_1": ["one", "two"], "text_2": ["that", "this"]}
        answer, requests = await _asked(setup, "/score", body, [[0.25], [0.75]])
    asked = {bytes(request.prompt_token_ids): score for request, score in zip(requests, (0.25, 0.75), strict=True)}
    assert asked.keys() == {b"onethat", b"twothis"}
    assert [one["score"] for one in answer["data"]] == [asked[b"onethat"], asked[b"twothis"]]
    assert answer["usage"] == {"prompt_tokens": 14, "total_tokens": 14}


@pytest.mark.parametrize(
    ("facts", "path", "body", "read"),
    [
        (EMBEDS, "/v1/embeddings", {"input": "abcdef"}, b"abcde"),
        (CLASSIFIES, "/classify", {"input": "abcdef", "truncation_side": "right"}, b"abcde"),
        (SCORES, "/score", {"text_1": "ab", "text_2": "cdef"}, b"abcde"),
        (SCORES, "/rerank", {"query": "abcd", "documents": ["efgh"]}, b"abefg"),
    ],
)
async def test_inputs_can_be_cut(facts: PoolingFacts, path: str, body: dict[str, Any], read: bytes) -> None:
    async with http_setup(pooling=facts) as setup:
        body |= {"truncate_prompt_tokens": 5}
        asking = asyncio.create_task(setup.http.post(path, json=body))
        request = await setup.pair.prefill.next_request()
        setup.pair.prefill.send(request, 0, [], finish_reason=FinishReason.STOP, pooling_output=[1.0])
        assert (await asking).status_code == 200
        refused = await setup.http.post(path, json=body | {"truncate_prompt_tokens": 0})
    assert bytes(request.prompt_token_ids) == read
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_without_a_head_scores_are_cosines() -> None:
    async with http_setup(pooling=EMBEDS) as setup:
        body = {"text_1": "what", "text_2": "that"}
        answer, _ = await _asked(setup, "/score", body, [[1.0, 0.0], [0.6, 0.8]])
    assert [one["score"] for one in answer["data"]] == pytest.approx([0.6])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(path: str) -> None:
    async with http_setup(pooling=SCORES) as setup:
        body = {"model": "tiny", "query": "what", "documents": ["a", "b", "c"], "top_n": 2}
        answer, _ = await _asked(setup, path, body, [[0.25], [0.75], [0.5]])
    assert answer == {
        "model": "tiny",
        "results": [
            {"index": 1, "document": {"text": "b"}, "relevance_score": 0.75},
            {"index": 2, "document": {"text": "c"}, "relevance_score": 0.5},
        ],
        "usage": {"prompt_tokens": 15, "total_tokens": 15},
    }


@pytest.mark.parametrize("top_n", [None, 0, 9])
async def test_all_documents_are_ranked_unless_fewer_are_asked_for(top_n: int | None) -> None:
    async with http_setup(pooling=SCORES) as setup:
        body = {"query": "what", "documents": ["a", "b"], "top_n": top_n, "return_documents": False}
        answer, _ = await _asked(setup, "/rerank", body, [[0.5], [0.5]])
    assert answer["results"] == [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": 0.5}]


@pytest.mark.parametrize(
    ("facts", "path", "body", "param"),
    [
        (EMBEDS, "/classify", {"input": "one"}, "model"),
        (CLASSIFIES, "/score", {"text_1": "a", "text_2": "b"}, "model"),
        (CLASSIFIES, "/classify", {"input": []}, "input"),
        (CLASSIFIES, "/classify", {"input": ["one", ""]}, "input[1].text"),
        (CLASSIFIES, "/classify", {"input": "x" * 100}, "input[0].text"),
        (CLASSIFIES, "/classify", {"input": "one", "activation": True, "use_activation": False}, "use_activation"),
        (SCORES, "/score", {"text_1": [], "text_2": "b"}, "text_1"),
        (SCORES, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORES, "/score", {"text_1": ["a"], "text_2": []}, "text_2"),
        (SCORES, "/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1].text"),
        (SCORES, "/score", {"text_1": ["a", "a"], "text_2": ["b", ""]}, "text_2[1].text"),
        (EMBEDS, "/score", {"text_1": "", "text_2": "b"}, "text_1.text"),
        (SCORES, "/rerank", {"query": "a", "documents": []}, "documents"),
        (SCORES, "/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (EMBEDS, "/rerank", {"query": "", "documents": ["b"]}, "query.text"),
    ],
)
async def test_mistakes_are_named_as_they_were_sent(
    facts: PoolingFacts, path: str, body: dict[str, Any], param: str
) -> None:
    async with http_setup(pooling=facts) as setup:
        answer = await setup.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        for _ in range(100):
            await asyncio.sleep(0)
        assert_nothing_is_left(setup.pair)


async def test_one_pair_that_fails_ends_the_others() -> None:
    async with http_setup(pooling=SCORES) as setup:
        asking = asyncio.create_task(setup.http.post("/score", json={"text_1": ["a", "b"], "text_2": ["c", "d"]}))
        first = await setup.pair.prefill.next_request()
        second = await setup.pair.prefill.next_request()
        setup.pair.prefill.send(first, 0, [], finish_reason=FinishReason.ERROR, error="it broke")
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert setup.pair.prefill.aborted == [second.request_id]
        assert_nothing_is_left(setup.pair)
