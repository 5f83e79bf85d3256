"""Tool calls and reasoning, read from text: the same in whatever pieces the text comes.

Tests of cluster/api/http/parsing/json_calls.py, cluster/api/http/parsing/message_parser.py,
cluster/api/http/parsing/pieces.py, cluster/api/http/parsing/qwen3_coder.py, cluster/api/http/parsing/reasoning.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.http.parsing.message_parser import ForcedCallParser, MessageParser, RequiredCallsParser
from cluster.api.http.parsing.pieces import (
    CallArguments,
    CallBegin,
    Content,
    Piece,
    Reasoning,
    TextParser,
    joined,
)
from cluster.api.http.parsing.qwen3_coder import Qwen3CoderParser
from cluster.api.http.parsing.reasoning import ReasoningParser
from cluster.api.http.parsing.tool_calls import HermesParser, Llama3JsonParser, MistralParser

MakeParser = Callable[[], TextParser]


def call(name: str, arguments: str) -> list[Piece]:
    return [CallBegin(name), CallArguments(arguments)]


def coder() -> Qwen3CoderParser:
    return Qwen3CoderParser({"f": {"type": "object", "properties": {"s": {"type": "string"}}}})


def think() -> ReasoningParser:
    return ReasoningParser("<think>", "</think>", has_begun=False)


def thinking() -> ReasoningParser:
    return ReasoningParser("<think>", "</think>", has_begun=True)


CALLS: list[tuple[MakeParser, str, list[Piece]]] = [
    (HermesParser, "Hello <b>you</b>", [Content("Hello <b>you</b>")]),
    (HermesParser, "  \n", [Content("  \n")]),
    (
        HermesParser,
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1, {}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"q": 1}, "name": "g"}\n</tool_call>\n'),
        [Content("I look.\n"), *call("f", '{"a": "x}\\"", "b": [1, {}]}'), *call("g", '{"q": 1}')],
    ),
    (HermesParser, 'x<tool_call>{"name": "f"}</tool_call> then', [Content("x"), *call("f", "{}"), Content(" then")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', call("f", '{"a": 1}')),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1', call("f", '{"a": 1')),
    (HermesParser, '<tool_call>{"nam', [Content('<tool_call>{"nam')]),
    (HermesParser, "a <tool_call> no JSON </tool_call> b", [Content("a <tool_call> no JSON </tool_call> b")]),
    (HermesParser, '<tool_call>{"x": 1}</tool_call> b', [Content('<tool_call>{"x": 1}</tool_call> b')]),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}', [Content('<tool_call>{"name": 5, "arguments": {}}')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": }</tool_call>!', [*call("f", ""), Content("!")]),
    (
        Llama3JsonParser,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [*call("f", '{"a": 1}'), *call("g", "{}")],
    ),
    (Llama3JsonParser, ' <|python_tag|>{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    (Llama3JsonParser, '{"answer": 5} yes', [Content('{"answer": 5} yes')]),
    (Llama3JsonParser, '<|python_tag|>{"answer": 5}', [Content('{"answer": 5}')]),
    (Llama3JsonParser, 'Call {"name": "f"}', [Content('Call {"name": "f"}')]),
    (Llama3JsonParser, "<|pyth", [Content("<|pyth")]),
    (
        MistralParser,
        'Hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [Content("Hi "), *call("f", '{"a": 1}'), *call("g", "{}")],
    ),
    (
        MistralParser,
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "}"}[TOOL_CALLS]g {"b": 2}',
        [*call("f", '{"a": "}"}'), *call("g", '{"b": 2}')],
    ),
    (MistralParser, '[TOOL_CALLS] [{"x": 1}]', [Content('[TOOL_CALLS][{"x": 1}]')]),
    (MistralParser, "[TOOL_CALLS]", [Content("[TOOL_CALLS]")]),
    (MistralParser, "[TOOL_CALLS]f", [Content("[TOOL_CALLS]f")]),
    (
        coder,
        ("ok\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=o>\nno\nJSON\n</parameter>\n</function>\n</tool_call>\n"),
        [Content("ok\n\n"), *call("f", '{"s": "12", "n": 12, "o": "no\\nJSON"}')],
    ),
    (coder, "<tool_call><function=g></function></tool_call>", call("g", "{}")),
    (coder, "<function=g", [Content("<function=g")]),
    (RequiredCallsParser, '[{"name": "f", "parameters": {"a": [1]}}, {"name": "g", "parameters": {}}]', [
        *call("f", '{"a": [1]}'), *call("g", "{}"),
    ]),
    (lambda: ForcedCallParser("f"), '{"a": 1}', call("f", '{"a": 1}')),
]  # fmt: skip
REASONING: list[tuple[MakeParser, str, list[Piece]]] = [
    (think, "<think>\nhm\n\nok\n</think>\n\nyes\n", [Reasoning("hm\n\nok"), Content("yes\n")]),
    (think, " just\nan answer", [Content(" just\nan answer")]),
    (think, "<think></think>yes", [Content("yes")]),
    (think, "<thi", [Content("<thi")]),
    (thinking, "hm</think>yes </think>", [Reasoning("hm"), Content("yes </think>")]),
    (thinking, "<think>hm", [Reasoning("hm")]),
    (thinking, "hm\n", [Reasoning("hm\n")]),
    (thinking, 'f?</think>\n<tool_call>{"name": "f"}</tool_call>', [Reasoning("f?"), *call("f", "{}")]),
]


def read(parser: TextParser, text: str, cuts: Sequence[int] = ()) -> list[Piece]:
    ends = [*sorted(cuts), len(text)]
    pieces: list[Piece] = []
    for start, end in zip([0, *ends], ends, strict=False):
        pieces += parser.push(text[start:end])
    # Arguments that are empty are none.
    return joined(piece for piece in [*pieces, *parser.finish()] if piece != CallArguments(""))


def same_in_all_pieces(make: Callable[[], TextParser], text: str, expected: list[Piece]) -> None:
    expected = [piece for piece in expected if piece != CallArguments("")]
    assert read(make(), text) == expected
    assert read(make(), text, range(len(text))) == expected
    draw = random.Random(len(text))
    for _ in range(20):
        cuts = draw.sample(range(len(text) + 1), min(len(text), draw.randint(1, 6)))
        assert read(make(), text, cuts) == expected, cuts


@pytest.mark.parametrize(("make", "text", "expected"), CALLS)
def test_calls_are_read_as_they_were_written(make: MakeParser, text: str, expected: list[Piece]) -> None:
    same_in_all_pieces(lambda: MessageParser(None, make()), text, expected)


@pytest.mark.parametrize(("make", "text", "expected"), REASONING)
def test_reasoning_ends_where_the_answer_begins(make: MakeParser, text: str, expected: list[Piece]) -> None:
    same_in_all_pieces(lambda: MessageParser(make(), HermesParser()), text, expected)


def test_calls_beyond_the_first_are_left_out_where_one_is_wanted() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    same_in_all_pieces(lambda: MessageParser(None, HermesParser(), max_calls=1), text, call("f", "{}"))


_FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "</think>"),
        *("<function=", "</function>", "<parameter=", "</parameter>", ">", *'{}[]:,;"\\'),
        *('"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {', "f", " ", "\n", "é", "1", "null"),
    ]
)  # fmt: skip


@given(st.lists(_FRAGMENTS, max_size=12), st.lists(st.integers(0, 80), max_size=4))
def test_no_text_is_read_otherwise_in_other_pieces(fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    cuts = [min(cut, len(text)) for cut in cuts]
    for make in (HermesParser, Llama3JsonParser, MistralParser, coder, RequiredCallsParser):
        whole = read(MessageParser(thinking(), make()), text)
        assert read(MessageParser(thinking(), make()), text, cuts) == whole
        begun = False
        for piece in whole:
            begun |= isinstance(piece, CallBegin)
            assert begun or not isinstance(piece, CallArguments), "arguments of no call"


@given(st.text(max_size=30), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4))
def test_arguments_that_are_json_stay_what_they_are(name: str, value: object) -> None:
    arguments = json.dumps({"value": value})
    text = f'<tool_call>\n{{"name": {json.dumps("f" + name)}, "arguments": {arguments}}}\n</tool_call>'
    assert read(MessageParser(None, HermesParser()), text) == call("f" + name, arguments)
