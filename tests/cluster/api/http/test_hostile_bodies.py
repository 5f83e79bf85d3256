"""Bodies made from the classes that read them, and then made wrong: each is answered, none by a server's error.

What a body asks for is answered by engines at once. Whatever comes, an answer has OpenAI's shape, and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from cluster.api.http.handlers import OPERATIONS
from cluster.api.http.openapi import openapi
from cluster.settings.http import HttpConfig
from tests.cluster.api.http.test_any_request import answering
from tests.cluster.serving_setup import assert_nothing_is_left

_DOCUMENT: Final = openapi(OPERATIONS)
_CONFIG: Final = HttpConfig(tool_parser="hermes", reasoning_parser="qwen3", max_body_bytes=1_000_000)
_BODIES: Final = {operation.path: operation.body.__name__ for operation in OPERATIONS if operation.body is not None}
_MAX_DEPTH: Final = 6
_NUMBERS: Final = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, True)
_TEXTS: Final = (
    "",
    "a",
    "\0",
    "\ud7ff",
    "😀" * 50,
    "a" * 5000,
    "../../etc/passwd",
    "null",
    '{"a":',
    "ﷺ",
    "\u202e",
    "none",
)
_WRONG: Final[SearchStrategy[JsonValue]] = st.sampled_from(
    [None, True, {}, [], [[]], [{}], {"": {}}, *_NUMBERS, *_TEXTS, [0] * 2000, [""] * 2000, [{}] * 2000, [[1]] * 300]
)


def _values(schema: dict[str, JsonValue], depth: int = 0) -> SearchStrategy[JsonValue]:
    """Values as a schema of the document describes them, with few of the fields that may be left out."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _values(_DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]], depth)
    for several in ("anyOf", "oneOf"):
        if isinstance(kinds := schema.get(several), list):
            return st.one_of(*(_values(kind, depth) for kind in kinds if isinstance(kind, dict)))
    if "const" in schema:
        return st.just(schema["const"])
    if isinstance(choices := schema.get("enum"), list):
        return st.sampled_from(choices)
    match schema.get("type"):
        case "object" if depth < _MAX_DEPTH:
            return _objects(schema, depth)
        case "array":
            items = schema.get("items")
            few = 0 if depth >= _MAX_DEPTH else 3
            return st.lists(_values(items if isinstance(items, dict) else {}, depth + 1), max_size=few).map(list)
        case "string":
            return st.sampled_from(["tiny", "a", "hello", "user", "data:image/png;base64,AAAA"])
        case "integer":
            return st.integers(0, 3)
        case "number":
            return st.sampled_from([0, 0.5, 1, 2.0])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return st.sampled_from([None, 1, "a", {"type": "object"}])


@st.composite
def _objects(draw: DrawFn, schema: dict[str, JsonValue], depth: int) -> JsonValue:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        entries = schema.get("additionalProperties")
        values = _values(entries if isinstance(entries, dict) else {}, depth + 1)
        return dict(draw(st.dictionaries(st.sampled_from(["1", "type", "a", "-1"]), values, max_size=3)))
    names = set(required if isinstance(required, list) else ())
    names |= set(draw(st.lists(st.sampled_from(sorted(properties)), max_size=4)))
    return {
        str(name): draw(_values(properties[str(name)], depth + 1))  # type: ignore[arg-type]  # a schema
        for name in sorted(map(str, names))
    }


def _paths(value: JsonValue, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [place]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, child in children:
        found += _paths(child, (*place, step))
    return found


def _with(value: JsonValue, place: tuple[str | int, ...], new: JsonValue) -> JsonValue:
    if not place:
        return new
    step, *rest = place
    if isinstance(value, dict):
        return value | {str(step): _with(value.get(str(step)), tuple(rest), new)}
    assert isinstance(value, list)
    return [_with(one, tuple(rest), new) if index == step else one for index, one in enumerate(value)]


@st.composite
def _hostile(draw: DrawFn) -> tuple[str, bytes]:
    """A path, and what is sent there: a body in which up to two values are others, and whose JSON may be broken."""
    path = draw(st.sampled_from(sorted(_BODIES)))
    body = draw(_values(_DOCUMENT["components"]["schemas"][_BODIES[path]]))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(_paths(body)))
        new = draw(_WRONG)
        if place and isinstance(place[-1], str) and draw(st.booleans()):
            place = (*place[:-1], draw(st.sampled_from(["", "model", "n", "x" * 100])))
        body = _with(body, place, new)
    data = json.dumps(to_jsonable_python(body), ensure_ascii=draw(st.booleans())).encode()
    match draw(st.integers(0, 9)):
        case 0:
            data = data[: draw(st.integers(0, len(data)))]
        case 1:
            data = data[:-1] + b"," + data[1:]
        case 2:
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
    return path, data


async def _check(bodies: list[tuple[str, bytes]]) -> None:
    async with answering(_CONFIG) as setup:
        for path, data in bodies:
            async with asyncio.timeout(60):
                answer = await setup.http.post(path, content=data, headers={"content-type": "application/json"})
            # Times that cannot be met are asked for, too.
            assert answer.status_code in (200, 400, 404, 413, 504), (path, data[:500], answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert len(answer.text) < 10_000, "an error repeats what was sent"
        assert_nothing_is_left(setup.pair)


def _run(bodies: list[tuple[str, bytes]]) -> None:
    asyncio.run(_check(bodies))


_FEW = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
_MANY = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
_BATCHES = st.lists(_hostile(), min_size=10, max_size=20)


@_FEW
@given(_BATCHES)
def test_hostile_bodies_are_answered(bodies: list[tuple[str, bytes]]) -> None:
    _run(bodies)


@pytest.mark.long
@pytest.mark.timeout(1800)
@_MANY
@given(_BATCHES)
def test_many_hostile_bodies_are_answered(bodies: list[tuple[str, bytes]]) -> None:
    _run(bodies)
