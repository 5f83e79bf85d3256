"""Sends requests over HTTP, and notes when each event of their streams comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import aiohttp
import msgspec

from cluster.bench.arrivals import PlannedRequest
from cluster.bench.load import Send
from cluster.bench.prompts import PromptSource
from cluster.bench.record import RequestRecord
from cluster.bench.server import Target, shortened
from cluster.bench.sse import EventReader, EventTooLong, StreamEvent, decode_event

Api = Literal["completions", "chat"]
_PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}
_MAX_ERROR_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class CallForm:
    """The common part of all calls. fields: further fields of the body, such as ignore_eos or temperature"""

    model: str
    api: Api = "completions"
    fields: Mapping[str, object] = field(default_factory=dict)

    def body(self, request: PlannedRequest, prompts: PromptSource) -> bytes:
        """Return the body of a request's call."""
        head = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.api == "chat":
            message = {"role": "user", "content": prompts.text(request)}
            own = {"messages": [message], "max_completion_tokens": request.num_output_tokens}
        else:
            own = {"prompt": prompts.token_ids(request), "max_tokens": request.num_output_tokens}
        return msgspec.json.encode({**head, **own, **self.fields})


class HttpSender:
    """A Sender to a server of OpenAI's API."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        form: CallForm,
        prompts: PromptSource,
        *,
        timeout_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Send to one server.

        timeout_s: the longest time of a whole answer; a longer one counts as failed
        clock:     seconds, monotonic; None: those of the running event loop
        """
        self._session, self._form, self._prompts = session, form, prompts
        self._url = f"{target.base_url}{_PATHS[form.api]}"
        self._headers = {**target.headers, "content-type": "application/json"}
        self._timeout_s = timeout_s
        self._clock = clock or asyncio.get_running_loop().time

    def prepare(self, request: PlannedRequest) -> Send:
        """Make the body of a call, so that nothing is left to do when the request is due."""
        return partial(self._send, self._form.body(request, self._prompts))

    async def _send(self, body: bytes, record: RequestRecord) -> None:
        record.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call(body, record)
        except TimeoutError:
            _fail(record, "timeout", f"the answer took longer than {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            _fail(record, "cannot connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            _fail(record, "connection lost", f"{type(error).__name__}: {error}")
        except (msgspec.DecodeError, EventTooLong) as error:
            _fail(record, "not an event", f"{type(error).__name__}: {error}")

    async def _call(self, body: bytes, record: RequestRecord) -> None:
        async with self._session.post(self._url, data=body, headers=self._headers) as response:
            if response.status != 200:
                _fail(record, f"HTTP {response.status}", shortened(await response.content.read(_MAX_ERROR_BYTES)))
                return
            reader, answer = EventReader(), _Answer(record)
            async for data in response.content.iter_any():
                now_s = self._clock()
                answer.take(reader.feed(data), now_s)
            answer.end()


class _Answer:
    """Reads the events of one stream, and records their times and contents."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._has_end = False

    def take(self, payloads: list[bytes], now_s: float) -> None:
        """Take the events of one read from the socket, all of which get the same time.

        Every event of a choice counts as one with a token, even without text, since a server may hold text back. Two
        kinds do not count: an event that only has the role, and an event that only has the finish reason, if the last
        token came in the same read. Some servers send the last token's text and the end in one event, some in two.
        """
        has_token = False
        for payload in payloads:
            if payload == b"[DONE]":
                self._has_end = True
                continue
            event = decode_event(payload)
            if event.has_error:
                _fail(self._record, "error in the stream", shortened(payload))
            self._take_usage(event)
            for choice in event.choices:
                self._has_end |= choice.finish_reason is not None
                is_end_alone = choice.finish_reason is not None and not choice.has_text and has_token
                if not choice.is_begin_of_message and not is_end_alone:
                    has_token = True
                    self._record.note_event(now_s)

    def end(self) -> None:
        """Judge the answer at its end."""
        if not self._has_end:
            _fail(self._record, "cut off", "the stream ended without [DONE] and without a finish_reason")
        elif self._record.first_s is None:
            _fail(self._record, "no token", "the stream had no event with a token")

    def _take_usage(self, event: StreamEvent) -> None:
        if event.usage is not None:
            self._record.num_input_tokens = event.usage.prompt_tokens
            self._record.num_output_tokens = event.usage.completion_tokens


def _fail(record: RequestRecord, kind: str, detail: str) -> None:
    if record.error is None:
        record.error, record.detail = kind, detail
