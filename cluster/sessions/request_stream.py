"""One request's outputs, on their way from its engine to whoever serves it.

The engine never waits for a reader. So outputs that are not read are kept, but not as many objects: beyond a few, each
is merged into the one before it, and what is kept grows by no more than the tokens themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import EngineLost

_MAX_UNMERGED: Final = 16
"""A reader that keeps up has one or two waiting."""


class RequestStream:
    """Ends after the finished output, or silently when the engine has let go of the request. Has one reader."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.is_taken = False
        """The engine has said that it has got the request."""
        self._outputs: deque[EngineCoreOutput] = deque()
        self._error: EngineLost | None = None
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[EngineCoreOutput]:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._outputs.popleft()

    def put(self, output: EngineCoreOutput) -> None:
        """Hand over an output; the finished one is the last."""
        outputs = self._outputs
        if len(outputs) >= _MAX_UNMERGED and _can_merge(outputs[-1], output):
            output = _merged(outputs.pop(), output)
        outputs.append(output)
        self._has_ended |= output.finished
        self._wake()

    def end(self, lost: EngineLost | None = None) -> None:
        """Nothing more will come. The first end is the one that counts."""
        if not self._has_ended:
            self._has_ended = True
            self._error = None if lost is None else lost.of_request(had_request=self.is_taken)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _can_merge(last: EngineCoreOutput, new: EngineCoreOutput) -> bool:
    """Whether these are tokens and the tokens after them, and nothing else is said of the first ones."""
    return (
        last.preemption is new.preemption is None
        and not last.finished
        and last.prompt_logprobs is None
        and (last.logprobs is None) == (new.logprobs is None)
        and new.first_position == last.first_position + len(last.new_token_ids)
    )


def _merged(last: EngineCoreOutput, new: EngineCoreOutput) -> EngineCoreOutput:
    # Extended, not copied: a reader that stalls for n tokens must not cost n * n.
    token_ids, logprobs = last.new_token_ids, last.logprobs
    token_ids.extend(new.new_token_ids)
    if logprobs is not None:
        logprobs.extend(new.logprobs or ())
    return replace(new, new_token_ids=token_ids, first_position=last.first_position, logprobs=logprobs)
