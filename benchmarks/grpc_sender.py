"""Sends the requests of a load over raypd's gRPC API, for cluster/bench."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.bench.arrivals import PlannedRequest
from cluster.bench.load import Send
from cluster.bench.prompts import PromptSource
from cluster.bench.record import RequestRecord
from cluster.client import GenerateClient
from cluster.client.errors import CallFailed

_TIMEOUT_S: Final = 600.0


class GrpcSender:
    """A Sender to a raypd cluster. Answers are greedy and have as many tokens as the plan asks for.

    timings: what the cluster says of the times of each complete answer, in the order of their ends
    """

    def __init__(
        self, client: GenerateClient, prompts: PromptSource, *, clock: Callable[[], float] | None = None
    ) -> None:
        """Send by a client with overload_timeout_s=0, so that a request that is refused counts as failed.

        clock: seconds, monotonic; None: those of the running event loop
        """
        self._client, self._prompts = client, prompts
        self._clock = clock or asyncio.get_running_loop().time
        self.timings: list[generate_pb2.Timings] = []

    def prepare(self, request: PlannedRequest) -> Send:
        """Draw the prompt."""
        return partial(self._send, self._prompts.token_ids(request))

    async def _send(self, prompt: list[int], record: RequestRecord) -> None:
        record.sent_s = self._clock()
        answer = self._client.generate(
            prompt,
            max_tokens=record.request.num_output_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=_TIMEOUT_S,
            resume=False,
        )
        try:
            async for response in answer:
                if response.token_ids:
                    record.note_event(self._clock())
                if response.HasField("usage"):
                    record.num_input_tokens = response.usage.prompt_tokens
                    record.num_output_tokens = response.usage.output_tokens
                    self.timings.append(response.timings)
        except CallFailed as error:
            record.error, record.detail = error.code.name, str(error)
