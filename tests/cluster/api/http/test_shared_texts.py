from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message

from cluster.api.http.shared_texts import SharedTextResponse, SharedTexts


class Writer:
    """Makes texts with numbers, each when it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = asyncio.Event()

    async def make(self) -> bytes:
        self.num_begun += 1
        text = f"text {self.num_begun}".encode()
        await self.may_end.wait()
        return text


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_who_come_while_a_text_is_made_share_the_next_one() -> None:
    texts, writer = SharedTexts(), Writer()
    first = asyncio.create_task(texts.get(None, writer.make))
    await settle()
    later = [asyncio.create_task(texts.get(None, writer.make)) for _ in range(300)]
    await settle()
    assert writer.num_begun == 1, "one at a time"
    writer.may_end.set()
    assert await asyncio.gather(first, *later) == [b"text 1"] + [b"text 2"] * 300
    assert not texts._newest, "nobody waits"
    assert await texts.get(None, writer.make) == b"text 3"


async def test_callers_who_may_see_different_things_get_different_texts() -> None:
    texts, writer = SharedTexts(), Writer()
    keys = [None, frozenset({"a"}), None, frozenset({"a"})]
    tasks = [asyncio.create_task(texts.get(key, writer.make)) for key in keys]
    await settle()
    writer.may_end.set()
    assert await asyncio.gather(*tasks) == [b"text 1", b"text 2", b"text 3", b"text 2"]


async def test_a_caller_that_leaves_and_a_text_that_fails_hold_nobody_up() -> None:
    texts, writer = SharedTexts(), Writer()

    async def fail() -> bytes:
        raise OSError("no view")

    leaving = asyncio.create_task(texts.get(None, writer.make))
    await settle()
    tasks = [asyncio.create_task(texts.get(None, make)) for make in (fail, writer.make)]
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    writer.may_end.set()
    with pytest.raises(OSError, match="no view"):
        await tasks[0]
    assert await tasks[1] == b"text 2"


async def test_a_text_is_sent_in_parts() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is received")

    text = bytes(range(256)) * 1000
    await SharedTextResponse(text, media_type="text/plain")({"type": "http"}, receive, send)
    assert (b"content-length", b"256000") in sent[0]["headers"]
    assert b"".join(message["body"] for message in sent[1:]) == text
    assert [len(message["body"]) for message in sent[1:]] == [65536, 65536, 65536, 59392, 0]
    assert [message["more_body"] for message in sent[1:]] == [True] * 4 + [False]
