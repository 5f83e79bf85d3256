"""An engine that costs nothing: a Serving on it shows what an ingress costs by itself."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, cycle, islice

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, RequestTimings
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.process.garbage_collection import collect_seldom, leave_out_what_is_loaded
from cluster.config import DEMO_MODEL
from cluster.observability.trace_writing.request_tracer import RequestTracer
from cluster.observability.tracing.request_tracing import RequestTracing
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineConnection, EngineDescriptor, EngineRole
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.sessions.request_stream import RequestStream
from cluster.settings.ingress import IngressConfig
from cluster.text.detokenizer import Detokenizer
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer

TICK_S = 0.005
_WORDS = "the quick brown fox jumps over a lazy dog and then returns to its den by way of the river "


class TokenSource:
    """An EngineConnection that gives its requests tokens in turn, so many per second in all. Lives on one event loop.

    emitted_s: when each token was given, by request, on the monotonic clock
    """

    def __init__(self, token_ids: Sequence[int], tokens_per_s: float) -> None:
        self._descriptor = EngineDescriptor("source", 1, EngineRole.BOTH, "nowhere:1")
        self._token_ids = token_ids
        self._tokens_per_s = tokens_per_s
        self._turns: deque[tuple[EngineCoreRequest, RequestStream]] = deque()
        self._running: set[str] = set()
        self.num_given = 0
        """All tokens that were given."""
        self.emitted_s: dict[str, array[float]] = {}
        self.submitted_s: list[float] = []

    @property
    def descriptor(self) -> EngineDescriptor:
        """See EngineConnection."""
        return self._descriptor

    @property
    def num_unfinished_requests(self) -> int:
        """See EngineConnection."""
        return len(self._running)

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        """See EngineConnection."""
        self.submitted_s.append(time.monotonic())
        stream = RequestStream(request)
        self._turns.append((request, stream))
        self._running.add(request.request_id)
        # The engine's id is the client's with an ending.
        self.emitted_s[request.request_id.rpartition("-")[0]] = array("d")
        return stream

    def abort(self, request_id: str) -> None:
        """See EngineConnection."""
        self._running.discard(request_id)

    async def run(self, num_streams: int) -> None:
        """Give tokens once so many streams are there, until cancelled."""
        while len(self._running) < num_streams:  # noqa: ASYNC110  # a benchmark
            await asyncio.sleep(TICK_S)
        began_s, num_given = time.monotonic(), 0
        while True:
            num_due = int((time.monotonic() - began_s) * self._tokens_per_s)
            for _ in range(min(num_due - num_given, len(self._turns))):
                self._give()
            num_given = num_due
            await asyncio.sleep(TICK_S)

    def _give(self) -> None:
        request, stream = self._turns.popleft()
        if request.request_id not in self._running:
            return
        emitted_s = self.emitted_s[request.request_id.rpartition("-")[0]]
        position = len(emitted_s)
        emitted_s.append(time.monotonic())
        self.num_given += 1
        is_last = position + 1 == request.sampling_params.max_tokens
        stream.put(
            EngineCoreOutput(
                request_id=request.request_id,
                attempt=request.attempt,
                new_token_ids=[self._token_ids[position % len(self._token_ids)]],
                first_position=position,
                finish_reason=FinishReason.LENGTH if is_last else None,
                timings=_timings(request) if is_last else None,
            )
        )
        if is_last:
            self._running.discard(request.request_id)
        else:
            self._turns.append((request, stream))


class OneEngine:
    """An EnginePool of one."""

    def __init__(self, engine: EngineConnection) -> None:
        self._engines = [engine]
        self._change = asyncio.Event()

    def snapshot(self) -> Sequence[EngineConnection]:
        """See EnginePool."""
        return self._engines

    def next_change(self) -> asyncio.Event:
        """Return an event that is never set: there is no change."""
        return self._change


def _timings(request: EngineCoreRequest) -> RequestTimings:
    return RequestTimings(
        queued_s=0.001,
        prefill_s=0.001,
        num_prompt_tokens_computed=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_preemptions=0,
        status_changes=[],
    )


def make_serving(
    tokens_per_s: float,
    max_requests: int,
    *,
    max_request_records: int = IngressConfig().max_request_records,
    request_tracer: RequestTracer | None = None,
    tracing: RequestTracing | None = None,
) -> tuple[Serving, TokenSource]:
    """A Serving with the demo model's tokenizer, on a source. To be called on its event loop.

    This process collects garbage as an ingress's does from now on.
    """
    tokenizer = ModelTokenizer.from_directory(DEMO_MODEL, use_fastokens=True)
    source = TokenSource(tokenizer.encode(_WORDS * 4), tokens_per_s)
    model = ModelDescription("demo", 131_072, tokenizer.backend.get_vocab_size(), (0,))
    version = ModelVersion(1, InputProcessor(model, tokenizer), PrefixAwarePair(16, hash_key=PUBLIC_KEY))
    settings = IngressConfig(
        max_requests_in_flight=max_requests, max_waiting_tokens=10**9, max_request_records=max_request_records
    )
    serving = Serving(
        ModelVersions(version),
        OneEngine(source),
        settings,
        ingress="ingress-0",
        request_tracer=request_tracer,
        tracing=tracing,
    )
    leave_out_what_is_loaded()
    collect_seldom()
    return serving, source


def text_lengths(num_tokens: int) -> list[int]:
    """How many characters a client has of the source's tokens after each of so many."""
    tokenizer = ModelTokenizer.from_directory(DEMO_MODEL, use_fastokens=True)
    detokenizer = Detokenizer(tokenizer.backend, [], skip_special_tokens=True)
    tokens = islice(cycle(tokenizer.encode(_WORDS * 4)), num_tokens)
    return list(accumulate(len(detokenizer.step(token)) for token in tokens))


def prompt_of(num_tokens: int) -> str:
    """Text of about so many tokens."""
    tokenizer = ModelTokenizer.from_directory(DEMO_MODEL, use_fastokens=True)
    num_each = len(tokenizer.encode(_WORDS * 10)) / 10
    return _WORDS * round(num_tokens / num_each)
