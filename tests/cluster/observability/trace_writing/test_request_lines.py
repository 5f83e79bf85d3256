from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from actors.core.requests.block_hash import BlockHashKey
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.slo import Slo
from cluster.observability.trace_writing.request_lines import hash_prompt, make_line
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord
from cluster.traces.request_trace import TraceLine, encode_line, parse_line

KEY = BlockHashKey(b"k" * 32)
SECRET_TOKEN = 987_654


def request(num_tokens: int = 600, **fields: Any) -> EngineCoreRequest:
    tokens = [SECRET_TOKEN + index for index in range(num_tokens)]
    return replace(
        EngineCoreRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams()), **fields
    )


def record(*attempts: AttemptRecord, **fields: Any) -> RequestRecord:
    given: dict[str, Any] = {"outcome": "length", "num_prompt_tokens": 600, "num_output_tokens": 4} | fields
    return RequestRecord("r", "tenant", "ingress-0", 1.7e9, attempts=attempts, **given)


PREFILL = EngineTimes(0.1, 0.4, 600, num_cached_tokens=48, num_preemptions=1)
DECODE = EngineTimes(0.02, 0.0, transfer_s=0.3, exposed_transfer_s=0.05, num_preemptions=2)


def test_a_line_tells_lengths_engines_phases_and_the_outcome() -> None:
    handed_over = AttemptRecord(0.0, ("decode-1", "decode-0"), "prefill-0", prefill=PREFILL, decode=DECODE)
    failed = AttemptRecord(0.0, ("decode-0",), failure="it died")
    one = record(failed, handed_over, ttft_s=0.6, duration_s=2.0, itl_p50_s=0.1, itl_max_s=0.2, model_version=3)
    assert make_line(7, one, 1.5, request(slo=Slo(ttft_s=0.5, itl_s=0.05)), None) == TraceLine(
        number=7,
        request_id="r",
        tenant="tenant",
        arrival_s=1.5,
        outcome="length",
        num_prompt_tokens=600,
        num_output_tokens=4,
        num_cached_tokens=48,
        ttft_aim_s=0.5,
        itl_aim_s=0.05,
        model_version=3,
        way="prefill_decode",
        prefill_engine="prefill-0",
        decode_engines=("decode-1", "decode-0"),
        queue_s=0.1,
        prefill_s=0.4,
        transfer_s=0.3,
        exposed_transfer_s=0.05,
        decode_s=1.4,
        ttft_s=0.6,
        itl_p50_s=0.1,
        itl_max_s=0.2,
        duration_s=2.0,
        num_attempts=2,
        num_moves=1,
        num_preemptions=3,
    )


def test_a_request_that_was_refused_at_once_has_a_line_without_lengths() -> None:
    line = make_line(1, record(outcome="overloaded", num_prompt_tokens=0, num_output_tokens=0), -0.001, None, KEY)
    assert line == TraceLine(number=1, request_id="r", tenant="tenant", arrival_s=0.0, outcome="overloaded")


def test_a_request_that_was_refused_for_its_length_has_its_length() -> None:
    assert make_line(1, record(num_prompt_tokens=0), 0.0, request(70), None).num_prompt_tokens == 70


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(1, 1), (512, 1), (513, 2), (1024, 2)])
def test_each_block_has_a_hash_the_last_one_possibly_for_fewer_tokens(num_tokens: int, num_hashes: int) -> None:
    assert len(hash_prompt(request(num_tokens), KEY)) == num_hashes


def test_equal_beginnings_have_equal_hashes_up_to_the_first_difference() -> None:
    long, short, salted = (
        hash_prompt(request(1600), KEY),
        hash_prompt(request(1100), KEY),
        request(1100, cache_salt="s"),
    )
    assert long[:2] == short[:2]
    assert not set(long[2:]) & set(short[2:])
    assert not set(hash_prompt(salted, KEY)) & set(short)
    assert not set(hash_prompt(request(1100), BlockHashKey(b"x" * 32))) & set(short)


def test_a_line_that_is_read_back_is_the_line_and_has_no_token() -> None:
    line = make_line(1, record(ttft_s=0.5, duration_s=1.0), 0.0, request(), KEY)
    encoded = encode_line(line)
    assert parse_line(encoded.decode()) == line
    fields = {name: value for name, value in json.loads(encoded).items() if name != "block_hashes"}
    assert str(SECRET_TOKEN)[:4] not in json.dumps(fields)
    assert not {SECRET_TOKEN + index for index in range(600)} & set(line.block_hashes)


def test_the_queue_that_a_request_was_rerouted_from_counts() -> None:
    left = AttemptRecord(0.25, ("decode-0",), "prefill-0", ended_s=2.25)
    went_on = AttemptRecord(2.25, ("decode-0",), decode=PREFILL)
    assert make_line(1, record(left, went_on), 0.0, None, None).queue_s == 2.1
