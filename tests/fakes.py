"""Stand-ins that more than one test file uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutput, Preemption, RequestTimings
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineLost
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineRole

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257


class FakeEngine:
    """An EngineConnection whose outputs the test sends. num_other_requests: not of the test, but routers count them"""

    def __init__(
        self, engine_id: str, role: EngineRole, model_version: int = 1, *, num_other_requests: int = 0
    ) -> None:
        self._descriptor = EngineDescriptor(engine_id, 7, role, f"{engine_id}.example:1", model_version=model_version)
        self.num_other_requests = num_other_requests
        self._streams: dict[str, asyncio.Queue[EngineCoreOutput | EngineLost | None]] = {}
        self._arrivals: asyncio.Queue[EngineCoreRequest] = asyncio.Queue()
        self.submitted: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.has_aborted = asyncio.Event()

    @property
    def descriptor(self) -> EngineDescriptor:
        return self._descriptor

    @property
    def num_unfinished_requests(self) -> int:
        return self.num_own_requests + self.num_other_requests

    @property
    def num_own_requests(self) -> int:
        """The unfinished requests of the test."""
        return len(self._streams)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        queue: asyncio.Queue[EngineCoreOutput | EngineLost | None] = asyncio.Queue()
        self._streams[request.request_id] = queue
        self.submitted.append(request)
        self._arrivals.put_nowait(request)
        return self._outputs(queue)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.has_aborted.set()
        if (queue := self._streams.pop(request_id, None)) is not None:
            queue.put_nowait(None)

    async def next_request(self) -> EngineCoreRequest:
        """The next request that is submitted."""
        return await asyncio.wait_for(self._arrivals.get(), timeout=60)

    def send(
        self,
        request: EngineCoreRequest,
        first_position: int,
        token_ids: Sequence[int] | str,
        *,
        finish_reason: FinishReason | None = None,
        end_cause: EndCause | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        timings: RequestTimings | None = None,
        pooling_output: list[float] | None = None,
    ) -> None:
        """One output of a request; a string stands for its bytes' tokens."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            new_token_ids=list(token_ids.encode() if isinstance(token_ids, str) else token_ids),
            first_position=first_position,
            finish_reason=finish_reason,
            end_cause=end_cause,
            stop_token_id=stop_token_id,
            error=error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            timings=timings,
            pooling_output=pooling_output,
        )
        if (queue := self._streams.get(request.request_id)) is None:
            return
        queue.put_nowait(output)
        if output.finished:
            del self._streams[request.request_id]

    def has(self, request: EngineCoreRequest) -> bool:
        """Whether it works on a request."""
        return request.request_id in self._streams

    def preempt(self, request: EngineCoreRequest, position: int, preemption: Preemption) -> None:
        """A request that has so many output tokens loses its blocks."""
        if (queue := self._streams.get(request.request_id)) is not None:
            queue.put_nowait(
                EngineCoreOutput(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    new_token_ids=[],
                    first_position=position,
                    preemption=preemption,
                )
            )

    def let_go(self, request: EngineCoreRequest) -> None:
        """End a request's stream without an output."""
        if (queue := self._streams.pop(request.request_id, None)) is not None:
            queue.put_nowait(None)

    def lose(self, *, has_left: bool = False, had_requests: bool = True) -> None:
        """Break the session. has_left: after it was drained. had_requests: it had said that it had got them."""
        lost = EngineLost(self._descriptor.engine_id, "connection reset", has_left=has_left, had_request=had_requests)
        for queue in self._streams.values():
            queue.put_nowait(lost)
        self._streams.clear()

    @staticmethod
    async def _outputs(queue: asyncio.Queue[EngineCoreOutput | EngineLost | None]) -> AsyncIterator[EngineCoreOutput]:
        while (item := await queue.get()) is not None:
            if isinstance(item, EngineLost):
                raise item
            yield item
            if item.finished:
                return


class FakePool:
    """An EnginePool of given engines."""

    def __init__(self, *engines: EngineConnection) -> None:
        self.engines = list(engines)
        self._change: asyncio.Event | None = None
        self.is_watched = asyncio.Event()

    def snapshot(self) -> Sequence[EngineConnection]:
        return list(self.engines)

    def next_change(self) -> asyncio.Event:
        self._change = self._change or asyncio.Event()
        self.is_watched.set()
        return self._change

    def replace(self, *engines: EngineConnection) -> None:
        """A newer membership."""
        self.engines = list(engines)
        if self._change is not None:
            self._change.set()
            self._change = None


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: a token is a byte and its id is the byte's value; <eos> is EOS_TOKEN_ID."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS_TOKEN_ID
    return tokenizer


def bos_tokenizer() -> Tokenizer:
    """The same, which adds <eos> before a text, as many do with a beginning-of-sequence token."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS_TOKEN_ID)]
    )
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
