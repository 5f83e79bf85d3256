"""An ingress without a cluster, on a thread of its own: it answers as the test says, and can be killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from cluster.api.grpc.conversions.statuses import status_of
from cluster.api.protos.raypd.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc
from cluster.api.protos.sample_seeds import sample_seed
from cluster.errors import FieldViolation, InvalidRequest, Overloaded

_TIMEOUT_S = 60.0


class ScriptedIngress(generate_pb2_grpc.GenerateServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Its answers are ASCII, and a token is a character.

    hold_after:    an answer waits after so many tokens until it is released, or aborted
    num_refusals:  so many calls are refused first, with retry_delay_s
    """

    def __init__(
        self,
        answer: Callable[[generate_pb2.GenerateRequest], str] = lambda _: "hello",
        address: str = "127.0.0.1:0",
    ) -> None:
        self._answer = answer
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.batches: list[generate_pb2.GenerateBatchRequest] = []
        self.hold_after: int | None = None
        self.num_refusals = 0
        self.retry_delay_s = 0.0
        self.time_left_s: list[float | None] = []
        self.is_held, self.has_aborted = threading.Event(), threading.Event()
        self._released = asyncio.Event()
        self._is_over = asyncio.Event()
        self.address = address

    def release(self) -> None:
        """Let held answers go on; from any thread."""
        self._loop.call_soon_threadsafe(self._released.set)

    def kill(self) -> None:
        """Cut every call, and listen no more; from any thread."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(_TIMEOUT_S)

    @contextmanager
    def serving(self) -> Iterator[ScriptedIngress]:
        """Serve in here."""
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)))
        self._thread.start()
        assert is_up.wait(_TIMEOUT_S)
        try:
            yield self
        finally:
            if self._thread.is_alive():
                self.kill()

    async def _serve(self, is_up: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = grpc.aio.server()
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(self.address)}"
        await server.start()
        is_up.set()
        await self._is_over.wait()
        await server.stop(0)

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        self.requests.append(request)
        self.time_left_s.append(context.time_remaining())
        if self.num_refusals:
            self.num_refusals -= 1
            status = status_of(Overloaded("it is full", self.retry_delay_s))
            await context.abort(status.code, status.message, status.trailing_metadata)
        if request.sampling_params.top_p > 1:
            violation = FieldViolation("sampling_params.top_p", str(request.sampling_params.top_p), "(0, 1]")
            status = status_of(InvalidRequest(violation))
            await context.abort(status.code, status.message, status.trailing_metadata)
        text = self._answer(request)
        begin = len(request.output_token_ids)
        try:
            for position in range(begin, len(text)):
                if position == self.hold_after:
                    self.is_held.set()
                    await self._released.wait()
                await context.write(_response(request, text, position, is_first=position == begin))
        except asyncio.CancelledError:
            self.has_aborted.set()
            raise

    async def GenerateBatch(self, request: generate_pb2.GenerateBatchRequest, context: Any) -> None:  # noqa: N802
        """Position by position, all samples in turn; whole samples if the best are asked for.

        hold_after: so many responses
        """
        self.batches.append(request)
        if self.num_refusals:
            self.num_refusals -= 1
            status = status_of(Overloaded("it is full", self.retry_delay_s))
            await context.abort(status.code, status.message, status.trailing_metadata)
        responses: list[tuple[int, int, int, generate_pb2.GenerateResponse]] = []
        for prompt_index, prompt in enumerate(request.prompts):
            for sample_index in range(request.n):
                one = generate_pb2.GenerateRequest(request_id=request.each.request_id, text=prompt.text)
                one.sampling_params.seed = sample_seed(request.each.sampling_params.seed or 3, sample_index)
                text = self._answer(one)
                parts = [_response(one, text, position, is_first=position == 0) for position in range(len(text))]
                if request.best_of:
                    whole = _response(one, text, len(text) - 1, is_first=True)
                    whole.text, whole.token_ids[:], whole.first_position = text, text.encode(), 0
                    parts = [whole]
                responses += [(number, prompt_index, sample_index, part) for number, part in enumerate(parts)]
        responses.sort(key=lambda entry: entry[:3])
        for number, (_, prompt_index, sample_index, response) in enumerate(responses):
            if number == self.hold_after:
                self.is_held.set()
                await self._released.wait()
            message = generate_pb2.GenerateBatchResponse(
                prompt_index=prompt_index, sample_index=sample_index, response=response
            )
            if request.best_of:
                message.cumulative_logprob = -1.0 - sample_index
            await context.write(message)

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusResponse:  # noqa: N802
        return admin_pb2.GetStatusResponse(model=f"scripted at {self.address}")


def _response(
    request: generate_pb2.GenerateRequest, text: str, position: int, *, is_first: bool
) -> generate_pb2.GenerateResponse:
    is_last = position == len(text) - 1
    length = generate_pb2.FINISH_REASON_LENGTH
    return generate_pb2.GenerateResponse(
        request_id=request.request_id or "drawn",
        text=text[position],
        token_ids=[ord(text[position])],
        first_position=position,
        finish_reason=length if is_last else generate_pb2.FINISH_REASON_UNSPECIFIED,
        usage=generate_pb2.Usage(prompt_tokens=1, output_tokens=len(text)) if is_last else None,
        seed=request.sampling_params.seed or 3 if is_first else None,
    )
