"""Messages between ranks arrive as they were, or are refused: by their kind, their fields' ranges, their arrays.

Tests of actors/ranks/rank_messages.py, kv_transfer/message_ranges.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.ranks.rank_codec import RankCodec
from actors.ranks.rank_messages import CODEC, RankFailed, RankReady, RankSecrets, RankStep, RankTrusts
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.trust.membership import TrustMaterial
from tests.trusted import with_tls

STEP = CODEC.types.index(RankStep)


def test_a_step_arrives_as_it_was() -> None:
    rows = np.arange(3, dtype=np.int64)
    batch = replace(StepBatch.empty(), req_ids=["a", "b", "c"], rows=rows, num_plain=3, num_new_tokens=rows)
    bitmask = np.full((2, 5), -1, dtype=np.int32)
    step = SchedulerOutput(batch, [], {"d"}, grammar_bitmask=bitmask, num_drafts_wanted=rows)
    received = CODEC.decode(CODEC.encode(step))
    assert isinstance(received, SchedulerOutput)
    assert received.batch.req_ids == ["a", "b", "c"]
    assert received.batch.rows.tolist() == [0, 1, 2]
    assert received.grammar_bitmask is not None
    assert received.grammar_bitmask.dtype == np.int32
    assert np.array_equal(received.grammar_bitmask, bitmask)
    assert received.finished_req_ids == {"d"}
    received.batch.rows[0] = 7  # It is an array of its own.


def test_secrets_arrive_as_they_were_and_are_not_shown() -> None:
    for material in (TrustMaterial.draw(), with_tls().material, TrustMaterial(1, secret_file="/a/b")):
        assert material is not None
        received = CODEC.decode(CODEC.encode(RankSecrets.of(material)))
        assert isinstance(received, RankSecrets)
        assert received.material == material
        for secret in material.secrets:
            assert repr(secret) not in repr(received)


@pytest.mark.parametrize(
    "array",
    [
        ["<i8", [1], b"1234567"],
        ["<i8", [2**40], b""],
        ["<i8", [-1], b""],
        ["<i8", [True], bytes(8)],
        ["<i8", [1, 1, 1, 1, 1], bytes(8)],
        ["|O", [1], bytes(8)],
        ["V8", [1], bytes(8)],
        [1, [1], bytes(8)],
        ["<i8", [1]],
        "an array",
        None,
    ],
    ids=repr,
)
def test_an_array_that_is_none_is_refused(array: Any) -> None:
    frame = bytes((STEP,)) + msgspec.msgpack.encode({"token_ids": array, "kv_connector_output": None})
    with pytest.raises(MALFORMED):
        CODEC.decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        bytes((STEP,)),
        CODEC.encode(RankStep(np.zeros((1, 1), np.int64), None))[:-1],
        CODEC.encode(RankReady("127.0.0.1:1")) + b"\x00",
        CODEC.encode(RankReady("a " * 10)),
        CODEC.encode(RankReady("a" * 1000)),
        CODEC.encode(RankTrusts(-1)),
        CODEC.encode(RankFailed("a" * 2**25)),
        b"\x00" + b"\x91" * 100_000,
    ],
    ids=len,
)
def test_a_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(MALFORMED):
        CODEC.decode(frame)


def test_nothing_but_arrays_and_messages_travels() -> None:
    with pytest.raises(TypeError, match="cannot be sent between ranks"):
        RankCodec([RankFailed]).encode(RankFailed(object()))  # type: ignore[arg-type]  # no reason
