"""The client for programs without an event loop."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from cluster.api.protos.raypd.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2
from cluster.client.client import GenerateClient
from cluster.client.client_credentials import Credentials
from cluster.client.errors import ClientClosed
from cluster.client.loop_thread import LoopClosed, LoopThread
from cluster.client.options import BatchOptions, ChatTurn, Options, Prompt
from cluster.client.retry_limits import OVERLOAD_TIMEOUT_S, RECOVERY_TIMEOUT_S
from cluster.client.vector_options import EmbedOptions, HeadOptions, Prompts
from cluster.client.whole_answers import Answer

_T = TypeVar("_T")


class BlockingClient:
    """A GenerateClient for programs without an event loop: it has the same methods, and each waits until it is done.

    Any thread may call the methods, several threads at the same time too. Methods that stream return generators. A
    request is aborted when its generator is closed or garbage-collected, and by Ctrl-C while a thread waits for it.
    Close the client with close(), or use it as a context manager. After close() every method raises an error:
    RuntimeError if it is called then, CallFailed with the code CANCELLED if it was under way.
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
        """Take the same arguments as GenerateClient, and start the thread that the client's event loop runs on.

        addresses: host:port of each ingress, as one string with commas between them or as a sequence; the first one is
            preferred
        spread: True: begin each request at the next ingress, in turn
        credentials: token and TLS files; None: those that Credentials.from_environment() reads
        recovery_timeout_s: how long a stream that was cut waits for an ingress to go on with, in seconds
        overload_timeout_s: how long a new request is tried again while every ingress is full, in seconds; 0: never
        Raises ValueError if there is no address, InvalidConfig if the credentials cannot be used.
        """
        self._client = GenerateClient(
            addresses,
            spread=spread,
            credentials=credentials,
            recovery_timeout_s=recovery_timeout_s,
            overload_timeout_s=overload_timeout_s,
        )
        self._thread = LoopThread("raypd-client")
        # The finalizer also closes a client that is garbage-collected, or still open when the interpreter ends.
        self._close = weakref.finalize(self, self._thread.close, self._client.close)
        self._thread.run(self._client.open())

    def close(self) -> None:
        """Abort every request under way, whichever thread waits for it, and close the connections. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- answers -------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> Generator[generate_pb2.GenerateResponse, None, None]:
        """Stream the answer to a prompt; see GenerateClient.generate(). Closing the generator aborts the request."""
        return self._stream(self._client.generate(prompt, **options))

    def chat(
        self, turns: Sequence[ChatTurn], **options: Unpack[Options]
    ) -> Generator[generate_pb2.GenerateResponse, None, None]:
        """Stream the next turn of a conversation; see GenerateClient.chat(). Closing the generator aborts it."""
        return self._stream(self._client.chat(turns, **options))

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer to a prompt or to a conversation; see GenerateClient.complete()."""
        return self._run(self._client.complete(prompt, **options))

    def complete_many(
        self, prompts: Iterable[Prompt], *, max_concurrent: int = 64, **options: Unpack[Options]
    ) -> list[Answer]:
        """Return the whole answers to several prompts, one request each; see GenerateClient.complete_many()."""
        return self._run(self._client.complete_many(prompts, max_concurrent=max_concurrent, **options))

    def generate_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> Generator[generate_pb2.GenerateBatchResponse, None, None]:
        """Stream n answers to each of several prompts, in one request; see GenerateClient.generate_batch()."""
        return self._stream(self._client.generate_batch(prompts, n=n, best_of=best_of, **options))

    def complete_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> list[list[Answer]]:
        """Return n whole answers to each prompt, in one request; see GenerateClient.complete_batch()."""
        return self._run(self._client.complete_batch(prompts, n=n, best_of=best_of, **options))

    def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None, *, resume: bool = True
    ) -> Generator[generate_pb2.GenerateResponse, None, None]:
        """Stream the answer to a GenerateRequest message; see GenerateClient.send()."""
        return self._stream(self._client.send(request, timeout_s, resume=resume))

    # -- vectors -------------------------------------------------------------------------------------------------

    def embed(self, inputs: Prompts, **options: Unpack[EmbedOptions]) -> embed_pb2.EmbedResponse:
        """Return an embedding of each input; see GenerateClient.embed()."""
        return self._run(self._client.embed(inputs, **options))

    def classify(self, inputs: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ClassifyResponse:
        """Return the scores of the model's classes for each input; see GenerateClient.classify()."""
        return self._run(self._client.classify(inputs, **options))

    def score(self, query: Prompt, documents: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ScoreResponse:
        """Return for each document how well it answers the query; see GenerateClient.score()."""
        return self._run(self._client.score(query, documents, **options))

    # -- the model and the cluster -------------------------------------------------------------------------------

    def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """Describe the served model; see GenerateClient.get_model()."""
        return self._run(self._client.get_model(timeout_s))

    def list_models(self, timeout_s: float | None = None) -> list[model_pb2.GetModelResponse]:
        """Describe every model and adapter that requests may name; see GenerateClient.list_models()."""
        return self._run(self._client.list_models(timeout_s))

    def tokenize(
        self,
        prompt: str | Sequence[ChatTurn],
        timeout_s: float | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Return the token ids of a text or a conversation; see GenerateClient.tokenize()."""
        return self._run(self._client.tokenize(prompt, timeout_s, add_special_tokens=add_special_tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids; see GenerateClient.detokenize()."""
        return self._run(
            self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, timeout_s=timeout_s)
        )

    def explain(
        self, request_id: str = "", *, last: int = 0, tenant: str | None = None, timeout_s: float | None = None
    ) -> generate_pb2.ExplainResponse:
        """Return why a request went to its engines and what came true; see GenerateClient.explain()."""
        return self._run(self._client.explain(request_id, last=last, tenant=tenant, timeout_s=timeout_s))

    def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Describe the cluster; see GenerateClient.status()."""
        return self._run(self._client.status(timeout_s))

    def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        both: int | None = None,
        encode: int | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Change how many engines of each role run; see GenerateClient.scale()."""
        return self._run(
            self._client.scale(prefill=prefill, decode=decode, both=both, encode=encode, timeout_s=timeout_s)
        )

    def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """Take an engine out of service; see GenerateClient.drain()."""
        self._run(self._client.drain(engine_id, for_good=for_good, timeout_s=timeout_s))

    def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """Take everything on a node out of service; see GenerateClient.drain_node()."""
        return self._run(self._client.drain_node(node, timeout_s))

    def update(self, model: str, timeout_s: float | None = None) -> int:
        """Replace the engines by ones that serve another checkpoint; see GenerateClient.update()."""
        return self._run(self._client.update(model, timeout_s))

    def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """Let an engine serve in another role from now on; see GenerateClient.set_role()."""
        self._run(self._client.set_role(engine_id, role, timeout_s))

    def load_adapter(self, name: str, directory: str, timeout_s: float | None = None) -> str:
        """Let requests name a LoRA adapter; see GenerateClient.load_adapter()."""
        return self._run(self._client.load_adapter(name, directory, timeout_s))

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Let no new request name an adapter; see GenerateClient.unload_adapter()."""
        self._run(self._client.unload_adapter(name, timeout_s))

    def reset_prefix_cache(
        self, engine_id: str = "", *, preempt: bool = False, timeout_s: float | None = None
    ) -> dict[str, bool]:
        """Clear the prefix cache of one engine or of all; see GenerateClient.reset_prefix_cache()."""
        return self._run(self._client.reset_prefix_cache(engine_id, preempt=preempt, timeout_s=timeout_s))

    def profile(
        self, engine_id: str, duration_s: float, *, with_trace: bool = False, timeout_s: float | None = None
    ) -> admin_pb2.ProfileResponse:
        """Profile an engine for duration_s seconds; see GenerateClient.profile()."""
        return self._run(self._client.profile(engine_id, duration_s, with_trace=with_trace, timeout_s=timeout_s))

    def rotate_secret(self, timeout_s: float | None = None) -> bool:
        """Replace the cluster's secret; see GenerateClient.rotate_secret()."""
        return self._run(self._client.rotate_secret(timeout_s))

    # -- on the other thread -------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._thread.run(coroutine)
        except concurrent.futures.CancelledError:
            raise ClientClosed from None

    def _stream(self, items: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
        """Ask for the next item only when the reader wants one, so that a slow reader slows the ingress down too."""

        async def next_item() -> _T | None:
            return await anext(items, None)

        has_begun = False
        try:
            while (item := self._run(next_item())) is not None:
                has_begun = True
                yield item
        except LoopClosed:
            # A stream that has begun ends with the same error as one that is waited for while the client is closed.
            if has_begun:
                raise ClientClosed from None
            raise
        finally:
            self._thread.finish(items.aclose())


def generate_blocking(
    addresses: str | Sequence[str], prompt: Prompt, **options: Unpack[Options]
) -> Generator[generate_pb2.GenerateResponse, None, None]:
    """Stream the answer to one prompt by a BlockingClient of its own, which is closed at the end.

    For programs that make a single request. The arguments and errors are those of BlockingClient.generate().
    """
    with BlockingClient(addresses) as client:
        yield from client.generate(prompt, **options)
