"""A refused call leaves nothing behind that only a full collection would free: an ingress makes these seldom."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest

from cluster.api.grpc.interceptor import _answering
from cluster.errors import FieldViolation, InvalidRequest


class Message:
    """A large one."""


class Context:
    """Keeps the exception that it aborts with, as gRPC's does."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self.error = RuntimeError(f"{code}: {details}")
        raise self.error


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_the_message_of_a_refused_call_is_gone_with_the_call(no_collection: None) -> None:
    received: list[weakref.ref[Message]] = []

    async def receive(context: Any) -> Message:
        message = Message()
        received.append(weakref.ref(message))
        return message

    async def refuse(request: Message, context: Any) -> None:
        raise InvalidRequest(FieldViolation("token_ids", "too many", "fewer"))

    context: Any = Context()
    with contextlib.suppress(RuntimeError):
        await _answering(refuse, nullcontext(), receive)(None, context)
    assert context.error is not None
    assert [message() for message in received] == [None]
