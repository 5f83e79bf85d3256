from __future__ import annotations

import json

import pytest

from cluster.traces.request_trace import TraceLine, encode_line, is_header, parse_header, parse_line
from tests.cluster.traces.trace_samples import HEADER, line


def test_a_header_and_a_line_come_back_as_they_were() -> None:
    one = line(
        3, 1.5, block_hashes=(1, 2), way="prefill_decode", prefill_engine="prefill-0", decode_engines=("decode-1",)
    )
    assert parse_header(encode_line(HEADER).decode()) == HEADER
    assert parse_line(encode_line(one).decode()) == one


def test_the_header_says_what_the_lines_are() -> None:
    assert json.loads(encode_line(HEADER)) == {
        "raypd_request_trace": 1,
        "began_at_s": 1.7e9,
        "ingress": "ingress-0",
        "part": 1,
        "block_tokens": 512,
        "block_hashes": "per_file",
    }


def test_a_line_leaves_out_what_did_not_happen() -> None:
    refused = TraceLine(number=1, request_id="r", arrival_s=0.5, outcome="overloaded")
    assert encode_line(refused) == b'{"number":1,"request_id":"r","arrival_s":0.5,"outcome":"overloaded"}\n'


@pytest.mark.parametrize(
    ("text", "is_one"),
    [('{"raypd_request_trace": 1}', True), ('{"raypd_request_trace": {}}', True), ('{"a": 1}', False), ("x", False)],
)
def test_a_header_of_any_version_is_known(text: str, is_one: bool) -> None:
    assert is_header(text) is is_one


def test_a_newer_form_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2 of the form, and this raypd reads 1"):
        parse_header('{"raypd_request_trace": 2}')
