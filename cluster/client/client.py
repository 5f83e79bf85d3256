"""The client for programs with an event loop; blocking.py has the one for those without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Self, Unpack

from cluster.api.protos.raypd.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2
from cluster.client.client_credentials import Credentials
from cluster.client.errors import first_failure
from cluster.client.known_ingresses import Ingresses, parse_addresses
from cluster.client.options import (
    BatchOptions,
    ChatTurn,
    Options,
    Prompt,
    make_batch_request,
    make_request,
    set_prompt,
)
from cluster.client.retry_limits import OVERLOAD_TIMEOUT_S, RECOVERY_TIMEOUT_S, RetryPolicy
from cluster.client.single_calls import SingleCalls
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


class GenerateClient:
    """A client of a cluster, for programs with an event loop. BlockingClient is for programs without one.

    The client knows one or several ingresses of the cluster, and passes over those that do not answer. Use it as an
    async context manager, or call open() and close(); all calls are made on the event loop that it was opened on.
    Cancelling the task of a call cancels the call at the ingress. The methods that read or generate go on at another
    ingress where a call fails for a reason that may pass; the methods that change the cluster make one call.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        spread: bool = False,
        credentials: Credentials | None = None,
        recovery_timeout_s: float = RECOVERY_TIMEOUT_S,
        overload_timeout_s: float = OVERLOAD_TIMEOUT_S,
    ) -> None:
        """Keep the settings; open() makes the connections.

        addresses: host:port of each ingress, as one string with commas between them or as a sequence; the first one is
            preferred
        spread: True: begin each request at the next ingress, in turn
        credentials: token and TLS files; None: those that Credentials.from_environment() reads
        recovery_timeout_s: how long a stream that was cut waits for an ingress to go on with, in seconds
        overload_timeout_s: how long a new request is tried again while every ingress is full, in seconds; 0: never
        Raises ValueError if there is no address.
        """
        self._addresses = parse_addresses(addresses)
        self._spread = spread
        self._credentials = credentials
        self._retry_policy = RetryPolicy(recovery_timeout_s, overload_timeout_s)
        self._opened: Ingresses | None = None

    async def open(self) -> None:
        """Open the channels on the running event loop; `async with` calls this method. Raises InvalidConfig."""
        self._opened = Ingresses(self._addresses, spread=self._spread, credentials=self._credentials)

    async def close(self) -> None:
        """Abort every request under way, and close the connections; `async with` calls this method at its end.

        Calls under way raise CallFailed with the code CANCELLED.
        """
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a prompt.

        Closing the generator, or cancelling its task, aborts the request: its engines stop it and free its memory.

        If the ingress goes away, the answer goes on at another one, or at the same one when it is back: text, tokens
        and log-probabilities come once and in order. The timings and cached tokens of the last response are then those
        of the last ingress alone. If all ingresses are full, the request is tried again after the delay that they name.
        With resume=False the client makes one call only.

        prompt:  a text, token ids, a conversation of (role, content), or a PromptEmbeds message
        options: such as max_tokens=64, temperature=0.0, stop=["\\n\\n"], timeout_s=10.0; see Options
        Raises CallFailed; ValueError or TypeError for an option that does not exist or cannot have its value.
        """
        message = make_request(prompt, options)
        answer = self.send(message, options.get("timeout_s"), resume=options.get("resume", True))
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    def chat(
        self, turns: Sequence[ChatTurn], **options: Unpack[Options]
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the next turn of a conversation, which the model's chat template renders; otherwise as generate().

        turns: (role, content) each, oldest first
        """
        return self.generate(turns, **options)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer to a prompt, or to a conversation; otherwise as generate()."""
        async with aclosing(self.generate(prompt, **options)) as responses:
            return Answer.of([response async for response in responses])

    async def complete_many(
        self, prompts: Iterable[Prompt], *, max_concurrent: int = 64, **options: Unpack[Options]
    ) -> list[Answer]:
        """Return the whole answers to several prompts, in the order of the prompts; each is a request of its own.

        max_concurrent: the most requests that are in flight at the same time
        options: the options of each request; timeout_s begins when the request is sent
        Raises what generate() raises, for the first request that fails; TypeError also if prompts is a single text. A
        failure, or cancelling the task, aborts all other requests.
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
            raise first_failure(failures) from None
        return [answer.result() for answer in answers]

    async def generate_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> AsyncGenerator[generate_pb2.GenerateBatchResponse, None]:
        """Stream n answers to each of several prompts side by side, in one request; each prompt is prefilled once.

        Each response names the prompt_index and the sample_index of its answer. If the ingress goes away, each answer
        goes on at its next position, as with generate(); prompts without any output yet are sent again as a smaller
        batch.

        n:       answers to each prompt
        best_of: generate this many answers to each prompt and return the n most likely ones, each whole, in one
                 response; None: stream all n answers
        options: the options of every answer; timeout_s is for the whole batch
        Raises what generate() raises, for the first answer that fails; TypeError also if prompts is a single text. A
        failure, closing the generator, or cancelling its task aborts all answers.
        """
        request, timeout_s = make_batch_request(prompts, n, best_of, options), options.get("timeout_s")
        if options.get("resume", True):
            batch = batch_resuming(self._ingresses, request, timeout_s, self._retry_policy)
        else:
            batch = batch_once(await self._ingresses.find(timeout_s), request, timeout_s)
        async with aclosing(batch) as responses:
            async for response in responses:
                yield response

    async def complete_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> list[list[Answer]]:
        """Return n whole answers to each prompt, in the order of the prompts; otherwise as generate_batch()."""
        batch = self.generate_batch(prompts, n=n, best_of=best_of, **options)
        async with aclosing(batch) as responses:
            return Answer.of_batch([response async for response in responses])

    async def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None, *, resume: bool = True
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Stream the answer to a GenerateRequest message; otherwise as generate().

        timeout_s: seconds for the whole answer, including waits and further calls; None: no limit
        resume:    False: make one call, and raise CallFailed if it fails
        """
        if resume:
            answer = stream_resuming(self._ingresses, request, timeout_s, self._retry_policy)
        else:
            answer = stream_once(await self._ingresses.find(timeout_s), request, timeout_s)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def explain(
        self, request_id: str = "", *, last: int = 0, tenant: str | None = None, timeout_s: float | None = None
    ) -> generate_pb2.ExplainResponse:
        """Return why a request went to its engines and what came true, as JSON (docs/routing.md). Raises CallFailed.

        request_id: of a request that is in flight or has ended lately at any ingress, or of a call with samples
        last:       instead of request_id, the number of the last requests, of all ingresses; at most 500
        tenant:     whose request it is; None: the caller's own, and for an operator's token anybody's
        """
        request = generate_pb2.ExplainRequest(request_id=request_id, last=last, tenant=tenant)
        return await self._single.read(lambda ingress: ingress.generate.Explain, request, timeout_s)

    async def embed(self, inputs: Prompts, **options: Unpack[EmbedOptions]) -> embed_pb2.EmbedResponse:
        """Return an embedding of each input, in their order. If the ingress goes away or is full, another one is asked.

        inputs:  one text, or a sequence of prompts
        options: such as dimensions=256, normalize=True, timeout_s=10.0; see EmbedOptions
        Raises CallFailed; ValueError or TypeError for an option that does not exist or cannot have its value.
        """
        request = make_embed_request(inputs, options)
        return await self._single.read(lambda ingress: ingress.embed.Embed, request, options.get("timeout_s"))

    async def classify(self, inputs: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ClassifyResponse:
        """Return the scores of the model's classes for each input; otherwise as embed().

        options: such as raw_logits=True, timeout_s=10.0; see HeadOptions
        """
        request = make_classify_request(inputs, options)
        return await self._single.read(lambda ingress: ingress.embed.Classify, request, options.get("timeout_s"))

    async def score(self, query: Prompt, documents: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ScoreResponse:
        """Return for each document a score of how well it answers the query, higher is better; otherwise as embed().

        documents: one text, or a sequence of prompts
        options:   such as raw_logits=True, timeout_s=10.0; see HeadOptions
        """
        request = make_score_request(query, documents, options)
        return await self._single.read(lambda ingress: ingress.embed.Score, request, options.get("timeout_s"))

    async def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """Describe the served model: its name, limits, versions and adapters. Raises CallFailed.

        timeout_s: seconds for the call, including waits and further tries; None: no limit. So in all methods below.
        """
        return await self._single.read(lambda ingress: ingress.model.GetModel, model_pb2.GetModelRequest(), timeout_s)

    async def list_models(self, timeout_s: float | None = None) -> list[model_pb2.GetModelResponse]:
        """Describe every model and adapter that requests may name as their model. Raises CallFailed."""
        request = model_pb2.ListModelsRequest()
        return list((await self._single.read(lambda ingress: ingress.model.ListModels, request, timeout_s)).models)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatTurn],
        timeout_s: float | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Return the token ids that generate() would make of a text or a conversation; nothing is generated.

        Raises CallFailed.
        add_special_tokens: whether the tokenizer adds its special tokens; None: to a text, and not to a conversation
        """
        message = generate_pb2.Prompt()
        set_prompt(message, prompt)
        request = model_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            request.text = message.text
        else:
            request.chat.CopyFrom(message.chat)
        return list((await self._single.read(lambda ingress: ingress.model.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids. Raises CallFailed.

        skip_special_tokens: whether the text leaves out special tokens, such as a beginning-of-sequence token
        """
        request = model_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._single.read(lambda ingress: ingress.model.Detokenize, request, timeout_s)).text

    async def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Describe the cluster's engines, ingresses, links and requests. Raises CallFailed."""
        return await self._single.read(lambda ingress: ingress.admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    async def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        both: int | None = None,
        encode: int | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Change how many engines of each role run; returns the ids of all engines that are wanted from now on.

        The method returns at once; the controller starts and drains engines afterwards.
        prefill, decode, both, encode: the number of engines of this role; None: it stays as it is. Raises CallFailed.
        """
        request = admin_pb2.ScaleRequest(prefill=prefill, decode=decode, both=both, encode=encode)
        response = await self._single.change(lambda ingress: ingress.admin.Scale, request, timeout_s)
        return list(response.engine_ids)

    async def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """Take an engine out of service once its requests have ended or migrated. Raises CallFailed.

        The method returns when the engine gets no new requests.
        for_good: True: the cluster wants one engine less; False: a new incarnation of the engine replaces it
        """
        request = admin_pb2.DrainRequest(engine_id=engine_id, for_good=for_good)
        await self._single.change(lambda ingress: ingress.admin.Drain, request, timeout_s)

    async def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """Take every engine and ingress on a node out of service, and start nothing there any more.

        Returns the ids of the engines that served there. Raises CallFailed.
        node: the node's address or hostname, or at least the first eight digits of its id in Ray
        """
        request = admin_pb2.DrainNodeRequest(node=node)
        response = await self._single.change(lambda ingress: ingress.admin.DrainNode, request, timeout_s)
        return list(response.engine_ids)

    async def update(self, model: str, timeout_s: float | None = None) -> int:
        """Replace the engines, group by group, by ones that serve another checkpoint.

        Returns the new model version at once; both are served until the last engine is replaced. Raises CallFailed.
        model: the checkpoint's directory, the same on every node
        """
        request = admin_pb2.UpdateRequest(model=model)
        response = await self._single.change(lambda ingress: ingress.admin.Update, request, timeout_s)
        return response.model_version

    async def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """Let an engine serve in another role from now on; it finishes what it has begun. Raises CallFailed.

        role: "prefill", "decode", "both" or "encode"
        """
        request = admin_pb2.SetRoleRequest(engine_id=engine_id, role=role)
        await self._single.change(lambda ingress: ingress.admin.SetRole, request, timeout_s)

    async def load_adapter(self, name: str, directory: str, timeout_s: float | None = None) -> str:
        """Let requests name a LoRA adapter, or replace the weights of one; returns the digest of its files.

        The method returns once every serving engine has loaded the adapter. Raises CallFailed.
        directory: the adapter's directory, the same on every node, below one of the cluster's lora.allowed_directories
        """
        request = admin_pb2.LoadAdapterRequest(name=name, directory=directory)
        response = await self._single.change(lambda ingress: ingress.admin.LoadAdapter, request, timeout_s)
        return response.digest

    async def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Let no new request name an adapter; requests that have it end with it. Raises CallFailed."""
        request = admin_pb2.UnloadAdapterRequest(name=name)
        await self._single.change(lambda ingress: ingress.admin.UnloadAdapter, request, timeout_s)

    async def reset_prefix_cache(
        self, engine_id: str = "", *, preempt: bool = False, timeout_s: float | None = None
    ) -> dict[str, bool]:
        """Clear the prefix cache of an engine.

        engine_id: the engine; "": every engine that serves
        preempt:   True: requests that run on the engine lose their blocks and start over; False: an engine whose blocks
                   requests hold keeps its cache
        Returns for each engine id whether its cache was cleared. Raises CallFailed.
        """
        request = admin_pb2.ResetPrefixCacheRequest(engine_id=engine_id, preempt=preempt)
        response = await self._single.change(lambda ingress: ingress.admin.ResetPrefixCache, request, timeout_s)
        return {**dict.fromkeys(response.reset_engine_ids, True), **dict.fromkeys(response.busy_engine_ids, False)}

    async def profile(
        self, engine_id: str, duration_s: float, *, with_trace: bool = False, timeout_s: float | None = None
    ) -> admin_pb2.ProfileResponse:
        """Profile an engine by torch's profiler; its requests go on, more slowly. Raises CallFailed.

        duration_s: seconds to profile; more than 0, at most 60
        with_trace: whether to return a trace besides the summary
        """
        request = admin_pb2.ProfileRequest(engine_id=engine_id, duration_seconds=duration_s, with_trace=with_trace)
        return await self._single.change(lambda ingress: ingress.admin.Profile, request, timeout_s)

    async def rotate_secret(self, timeout_s: float | None = None) -> bool:
        """Replace the secret by which engines and ingresses prove themselves to each other. Raises CallFailed.

        Returns whether the older secret is refused by now. It is accepted until every process has the new one.
        """
        request = admin_pb2.RotateSecretRequest()
        response = await self._single.change(lambda ingress: ingress.admin.RotateSecret, request, timeout_s)
        return response.is_old_refused

    @property
    def _ingresses(self) -> Ingresses:
        if self._opened is None:
            raise RuntimeError("the client is not open yet: use `async with`, or await open()")
        return self._opened

    @property
    def _single(self) -> SingleCalls:
        return SingleCalls(self._ingresses, self._retry_policy)
