"""Splits the bytes of a stream into events, and tells which events have tokens."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_EVENT_BYTES: Final = 16 << 20
"""The most bytes of an event; a longer one is a broken stream."""


class EventTooLong(Exception):
    """A stream had no end of an event within MAX_EVENT_BYTES."""


class EventReader:
    """Splits a stream of server-sent events, whose bytes may come in any pieces. Comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; return the data of each event that they complete. Raises EventTooLong."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if b"\n" not in event:
        return event[5:].lstrip() if event.startswith(b"data:") else b""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Usage(msgspec.Struct):
    """The tokens that the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_text(self) -> bool:
        """Whether the part has text or reasoning to show."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct):
    """The new part of a choice, of a completion (text) or of a chat (delta)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether the part has text or reasoning to show."""
        return bool(self.text) or (self.delta is not None and self.delta.has_text)

    @property
    def is_begin_of_message(self) -> bool:
        """Whether the part only has the role, which chats send before the first token."""
        return self.delta is not None and bool(self.delta.role) and not self.has_text and self.finish_reason is None


class StreamEvent(msgspec.Struct):
    """An event of /v1/completions or /v1/chat/completions; other fields are ignored."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_error(self) -> bool:
        """Whether the event ends the stream with an error."""
        return bytes(self.error) not in (b"", b"null")


decode_event: Final = msgspec.json.Decoder(StreamEvent).decode
"""Decodes the data of an event. Raises msgspec.DecodeError."""
