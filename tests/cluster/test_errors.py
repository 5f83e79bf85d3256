"""Errors travel between processes as what they are."""

from __future__ import annotations

import pickle

import grpc
import pytest

from actors.model.errors import UnsupportedModel
from cluster.client import CallFailed
from cluster.errors import EngineFailed, FieldViolation, InvalidConfig, InvalidRequest, UnknownEngine


@pytest.mark.parametrize(
    "error",
    [
        UnknownEngine("decode-9", ["decode-0"]),
        InvalidRequest(FieldViolation("n", "0", "at least 1"), FieldViolation("seed", "x", "a number")),
        EngineFailed("r", "it is dead", num_new_tokens=3, can_resume=True),
        InvalidConfig("cluster.yaml", ["one mistake", "another one"]),
        CallFailed(grpc.StatusCode.UNAVAILABLE, "it has gone", {"n": "at least 1"}, 0.5),
        UnsupportedModel("T5", "it is an encoder-decoder"),
    ],
)
def test_an_error_is_the_same_after_its_journey(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)
