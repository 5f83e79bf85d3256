"""Keeps the outputs that an engine has sent for one request until the request's reader takes them.

The engine never waits for a reader, so outputs that are not read are kept. Once a few outputs wait, each further one is
merged into the one before it, so that memory grows by the tokens alone and not by an object for each output.
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
"""How many outputs may wait before further ones are merged. A reader that keeps up has one or two waiting."""


class RequestStream:
    """The outputs of one request at one engine, as an async iterator for one reader.

    Iteration ends after the output that is `finished`, or without one when the engine has dropped the request or the
    request was aborted. It raises EngineLost if the session breaks.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.is_taken = False
        """Whether the engine has acknowledged the request."""
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
        """Add an output for the reader; the `finished` output is the last."""
        outputs = self._outputs
        if len(outputs) >= _MAX_UNMERGED and _can_merge(outputs[-1], output):
            output = _merged(outputs.pop(), output)
        outputs.append(output)
        self._has_ended |= output.finished
        self._wake()

    def end(self, lost: EngineLost | None = None) -> None:
        """End the stream after the outputs that it still has; later calls change nothing.

        lost: why the session broke, raised to the reader; None: the stream ends without an error
        """
        if not self._has_ended:
            self._has_ended = True
            self._error = None if lost is None else lost.of_request(had_request=self.is_taken)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _can_merge(last: EngineCoreOutput, new: EngineCoreOutput) -> bool:
    """Return whether the new output has only the tokens that follow the last one's, so that the two can be one."""
    return (
        last.preemption is new.preemption is None
        and not last.finished
        and last.prompt_logprobs is None
        and (last.logprobs is None) == (new.logprobs is None)
        and new.first_position == last.first_position + len(last.new_token_ids)
    )


def _merged(last: EngineCoreOutput, new: EngineCoreOutput) -> EngineCoreOutput:
    # The lists are extended and not copied: n tokens that a stalled reader has not taken must not cost n * n steps.
    token_ids, logprobs = last.new_token_ids, last.logprobs
    token_ids.extend(new.new_token_ids)
    if logprobs is not None:
        logprobs.extend(new.logprobs or ())
    return replace(new, new_token_ids=token_ids, first_position=last.first_position, logprobs=logprobs)
