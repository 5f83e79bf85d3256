"""The client for programs with an event loop; blocking.py has the one for those without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc.aio

from cluster.api.protos.raypd.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2
from cluster.client.client_credentials import Credentials
from cluster.client.errors import CallFailed, as_call_failed
from cluster.client.known_ingresses import Ingress, Ingresses, parse_addresses
from cluster.client.options import (
    BatchOptions,
    ChatTurn,
    Options,
    Prompt,
    make_batch_request,
    make_request,
    set_prompt,
)
from cluster.client.retry_limits import Deadline, Patience
from cluster.client.streams.attempts import Attempts
from cluster.client.streams.batch_stream import batch_once, batch_resuming
from cluster.client.streams.stream import stream_once, stream_resuming
from cluster.client.vector_options import (
    EmbedOptions,
    HeadOptions,
    Prompts,
    make_classify_request,
    make_embed_request,
    make_score_request,
)
from cluster.client.whole_answers import Answer

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class GenerateClient:
    """Calls a cluster by one or several of its ingresses; of several, those that do not answer are passed over.

    Use it as an async context manager, on one event loop. BlockingClient needs none.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        spread: bool = False,
        credentials: Credentials | None = None,
        recovery_timeout_s: float = 60.0,
        overload_timeout_s: float = 30.0,
    ) -> None:
        """addresses: host:port each, several with commas between them or in a sequence; the first is called first

        spread: begin each request at the next one of them instead, in turn
        credentials: token and TLS; None: as Credentials.from_environment() says
        recovery_timeout_s, overload_timeout_s: see Patience
        Raises ValueError if there is no address.
        """
        self._addresses = parse_addresses(addresses)
        self._spread = spread
        self._credentials = credentials
        self._patience = Patience(recovery_timeout_s, overload_timeout_s)
        self._opened: Ingresses | None = None

    async def open(self) -> None:
        """Belong to the running event loop from now on; `async with` does it."""
        self._opened = Ingresses(self._addresses, spread=self._spread, credentials=self._credentials)

    async def close(self) -> None:
        """Abort what is under way, and hang up; `async with` does it."""
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- answers -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a prompt. Closing the generator, or cancelling its task, aborts the request.

        If its ingress goes away, the answer goes on at another one, or at this one when it is back, as if nothing had
        happened: text, tokens and log-probabilities come once and in order. What the last response says of timings and
        cached tokens is the last ingress's part. If all of them are full, it is asked again when they said.

        options: such as max_tokens=64, temperature=0.0, stop=["\\n\\n"], timeout_s=10.0; see Options
        Raises CallFailed; ValueError or TypeError for a field that does not exist or cannot hold its value.
        """
        message = make_request(prompt, options)
        answer = self.send(message, options.get("timeout_s"), resume=options.get("resume", True))
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    def chat(
        self, turns: Sequence[ChatTurn], **options: Unpack[Options]
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the next turn of a conversation, by the model's chat template; otherwise as generate()."""
        return self.generate(turns, **options)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The whole answer to a prompt, or to a conversation; otherwise as generate()."""
        async with aclosing(self.generate(prompt, **options)) as responses:
            return Answer.of([response async for response in responses])

    async def complete_many(
        self, prompts: Iterable[Prompt], *, max_concurrent: int = 64, **options: Unpack[Options]
    ) -> list[Answer]:
        """The whole answers to several prompts, in their order; so many of them are asked at a time.

        options: of each of them; a timeout_s runs from when it is asked
        Raises CallFailed, the first one; all others are aborted then.
        """
        if isinstance(prompts, str):
            raise TypeError("complete_many() takes several prompts; complete() takes one")
        turns = asyncio.Semaphore(max_concurrent)

        async def ask(prompt: Prompt) -> Answer:
            async with turns:
                return await self.complete(prompt, **options)

        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(ask(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        return [answer.result() for answer in answers]

    async def generate_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> AsyncGenerator[generate_pb2.GenerateBatchResponse, None]:
        """Stream n answers to each of several prompts, side by side: each prompt is prefilled once, in one call.

        Responses have the prompt_index and the sample_index that they belong to. If the ingress goes away, each answer
        goes on at its next position, as with generate(); answers that had not begun begin elsewhere.

        best_of: make so many of each, and give the n that are most likely, each whole, in one response
        options: of each of them; timeout_s is for all
        Raises what generate() raises, at the first answer that fails; all others are aborted then.
        """
        request, timeout_s = make_batch_request(prompts, n, best_of, options), options.get("timeout_s")
        if options.get("resume", True):
            batch = batch_resuming(self._ingresses, request, timeout_s, self._patience)
        else:
            batch = batch_once(await self._ingresses.find(timeout_s), request, timeout_s)
        async with aclosing(batch) as responses:
            async for response in responses:
                yield response

    async def complete_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> list[list[Answer]]:
        """The n whole answers to each prompt, in the order of the prompts; otherwise as generate_batch()."""
        batch = self.generate_batch(prompts, n=n, best_of=best_of, **options)
        async with aclosing(batch) as responses:
            return Answer.of_batch([response async for response in responses])

    async def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None, *, resume: bool = True
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a request that is made already; otherwise as generate()."""
        if resume:
            answer = stream_resuming(self._ingresses, request, timeout_s, self._patience)
        else:
            answer = stream_once(await self._ingresses.find(timeout_s), request, timeout_s)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    # -- the model and the cluster -------------------------------------------------------------------------------

    async def embed(self, inputs: Prompts, **options: Unpack[EmbedOptions]) -> embed_pb2.EmbedResponse:
        """Give each input's embedding. If its ingress goes away, another one is asked.

        Raises CallFailed; ValueError or TypeError for an option that does not exist or cannot hold its value.
        """
        request = make_embed_request(inputs, options)
        return await self._read(lambda ingress: ingress.embed.Embed, request, options.get("timeout_s"))

    async def classify(self, inputs: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ClassifyResponse:
        """Give what the model's classification head says of each input; otherwise as embed()."""
        request = make_classify_request(inputs, options)
        return await self._read(lambda ingress: ingress.embed.Classify, request, options.get("timeout_s"))

    async def score(self, query: Prompt, documents: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ScoreResponse:
        """Give how well each document answers the query; otherwise as embed()."""
        request = make_score_request(query, documents, options)
        return await self._read(lambda ingress: ingress.embed.Score, request, options.get("timeout_s"))

    async def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """Describe the served model. Raises CallFailed."""
        return await self._read(lambda ingress: ingress.model.GetModel, model_pb2.GetModelRequest(), timeout_s)

    async def list_models(self, timeout_s: float | None = None) -> list[model_pb2.GetModelResponse]:
        """Describe everything that requests may name as their model. Raises CallFailed."""
        request = model_pb2.ListModelsRequest()
        return list((await self._read(lambda ingress: ingress.model.ListModels, request, timeout_s)).models)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatTurn],
        timeout_s: float | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """The tokens that text, or a conversation by the model's chat template, is for the model. Raises CallFailed."""
        message = generate_pb2.Prompt()
        set_prompt(message, prompt)
        request = model_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            request.text = message.text
        else:
            request.chat.CopyFrom(message.chat)
        return list((await self._read(lambda ingress: ingress.model.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """The text of tokens. Raises CallFailed."""
        request = model_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._read(lambda ingress: ingress.model.Detokenize, request, timeout_s)).text

    async def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Describe the cluster. Raises CallFailed."""
        return await self._read(lambda ingress: ingress.admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    async def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        both: int | None = None,
        encode: int | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Want so many engines from now on; returns the ids of all that are wanted then. Raises CallFailed."""
        request = admin_pb2.ScaleRequest(prefill=prefill, decode=decode, both=both, encode=encode)
        response = await self._change(lambda ingress: ingress.admin.Scale, request, timeout_s)
        return list(response.engine_ids)

    async def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """Take an engine out of service once its requests have ended or moved. Raises CallFailed."""
        request = admin_pb2.DrainRequest(engine_id=engine_id, for_good=for_good)
        await self._change(lambda ingress: ingress.admin.Drain, request, timeout_s)

    async def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """Take everything on a node out of service; returns the ids of its engines. Raises CallFailed.

        node: its address or hostname, or the begin of Ray's id
        """
        request = admin_pb2.DrainNodeRequest(node=node)
        response = await self._change(lambda ingress: ingress.admin.DrainNode, request, timeout_s)
        return list(response.engine_ids)

    async def update(self, model: str, timeout_s: float | None = None) -> int:
        """Replace the engines by ones that serve this checkpoint; returns its version. Raises CallFailed."""
        request = admin_pb2.UpdateRequest(model=model)
        response = await self._change(lambda ingress: ingress.admin.Update, request, timeout_s)
        return response.model_version

    async def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """Let an engine serve as prefill, decode or both from now on. Raises CallFailed."""
        request = admin_pb2.SetRoleRequest(engine_id=engine_id, role=role)
        await self._change(lambda ingress: ingress.admin.SetRole, request, timeout_s)

    async def load_adapter(self, name: str, directory: str, timeout_s: float | None = None) -> str:
        """Let requests name a LoRA adapter, once the engines have loaded it; returns its digest. Raises CallFailed."""
        request = admin_pb2.LoadAdapterRequest(name=name, directory=directory)
        response = await self._change(lambda ingress: ingress.admin.LoadAdapter, request, timeout_s)
        return response.digest

    async def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Let no new request name an adapter. Raises CallFailed."""
        request = admin_pb2.UnloadAdapterRequest(name=name)
        await self._change(lambda ingress: ingress.admin.UnloadAdapter, request, timeout_s)

    async def reset_prefix_cache(
        self, engine_id: str = "", *, preempt: bool = False, timeout_s: float | None = None
    ) -> dict[str, bool]:
        """Let an engine, or every one, forget its cached prompts; returns who could. Raises CallFailed.

        preempt: whether requests that run there start over for it
        """
        request = admin_pb2.ResetPrefixCacheRequest(engine_id=engine_id, preempt=preempt)
        response = await self._change(lambda ingress: ingress.admin.ResetPrefixCache, request, timeout_s)
        return {**dict.fromkeys(response.reset_engine_ids, True), **dict.fromkeys(response.busy_engine_ids, False)}

    async def profile(
        self, engine_id: str, duration_s: float, *, with_trace: bool = False, timeout_s: float | None = None
    ) -> admin_pb2.ProfileResponse:
        """Tell what an engine does for so long, by torch's profiler. Raises CallFailed."""
        request = admin_pb2.ProfileRequest(engine_id=engine_id, duration_seconds=duration_s, with_trace=with_trace)
        return await self._change(lambda ingress: ingress.admin.Profile, request, timeout_s)

    async def rotate_secret(self, timeout_s: float | None = None) -> bool:
        """Replace the cluster's secret; returns whether the older one is refused by now. Raises CallFailed."""
        request = admin_pb2.RotateSecretRequest()
        response = await self._change(lambda ingress: ingress.admin.RotateSecret, request, timeout_s)
        return response.is_old_refused

    @property
    def _ingresses(self) -> Ingresses:
        if self._opened is None:
            raise RuntimeError("the client is not open yet: use `async with`, or await open()")
        return self._opened

    # -- calls of one answer -------------------------------------------------------------------------------------

    async def _read(
        self, method: _Method[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        """Ask an ingress, and the others as well if that one is gone or full: nothing changes by it.

        If all are full it is asked again when they said, as generate() is. Raises CallFailed.
        """
        attempts = Attempts(self._ingresses, timeout_s, self._patience)
        ingress = await attempts.first()
        while True:
            try:
                with as_call_failed():
                    response = await method(ingress)(request, timeout=attempts.left_s())
            except CallFailed as failure:
                if not failure.is_passing:
                    raise
                attempts.note_failure(ingress, failure, is_under_way=False)
                ingress = await attempts.next_ingress(failure)
            else:
                ingress.note_answer()
                return response

    async def _change(
        self, method: _Method[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        """Ask the first ingress that can be connected to, once: it may have been heard. Raises CallFailed."""
        deadline = Deadline(timeout_s, _now_s())
        ingress = await self._ingresses.find(timeout_s)
        with as_call_failed():
            return await method(ingress)(request, timeout=deadline.left_s(_now_s()))


_Method = Callable[[Ingress], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
