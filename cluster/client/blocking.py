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
from cluster.client.vector_options import EmbedOptions, HeadOptions, Prompts
from cluster.client.whole_answers import Answer

_T = TypeVar("_T")


class BlockingClient:
    """GenerateClient for programs without an event loop: the same methods, which wait. Any thread may call them.

    Streams are generators: closing one, or leaving the loop that reads it and the function that it is in, aborts the
    request; so does Ctrl-C while one is waited for. Close the client, or use it as a context manager.
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
        """As for GenerateClient."""
        self._client = GenerateClient(
            addresses,
            spread=spread,
            credentials=credentials,
            recovery_timeout_s=recovery_timeout_s,
            overload_timeout_s=overload_timeout_s,
        )
        self._thread = LoopThread("raypd-client")
        # Also when it is forgotten, and at the interpreter's end.
        self._close = weakref.finalize(self, self._thread.close, self._client.close)
        self._thread.run(self._client.open())

    def close(self) -> None:
        """Abort what is under way, in whichever thread it is waited for, and hang up. Idempotent."""
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
        """Stream the answer to a prompt; as GenerateClient.generate()."""
        return self._stream(self._client.generate(prompt, **options))

    def chat(
        self, turns: Sequence[ChatTurn], **options: Unpack[Options]
    ) -> Generator[generate_pb2.GenerateResponse, None, None]:
        """Stream the next turn of a conversation; as GenerateClient.chat()."""
        return self._stream(self._client.chat(turns, **options))

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The whole answer; as GenerateClient.complete()."""
        return self._run(self._client.complete(prompt, **options))

    def complete_many(
        self, prompts: Iterable[Prompt], *, max_concurrent: int = 64, **options: Unpack[Options]
    ) -> list[Answer]:
        """The whole answers to several prompts; as GenerateClient.complete_many()."""
        return self._run(self._client.complete_many(prompts, max_concurrent=max_concurrent, **options))

    def generate_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> Generator[generate_pb2.GenerateBatchResponse, None, None]:
        """Stream n answers to each of several prompts; as GenerateClient.generate_batch()."""
        return self._stream(self._client.generate_batch(prompts, n=n, best_of=best_of, **options))

    def complete_batch(
        self, prompts: Iterable[Prompt], *, n: int = 1, best_of: int | None = None, **options: Unpack[BatchOptions]
    ) -> list[list[Answer]]:
        """The n whole answers to each prompt; as GenerateClient.complete_batch()."""
        return self._run(self._client.complete_batch(prompts, n=n, best_of=best_of, **options))

    def send(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None, *, resume: bool = True
    ) -> Generator[generate_pb2.GenerateResponse, None, None]:
        """Stream the answer to a request that is made already; as GenerateClient.send()."""
        return self._stream(self._client.send(request, timeout_s, resume=resume))

    # -- vectors -------------------------------------------------------------------------------------------------

    def embed(self, inputs: Prompts, **options: Unpack[EmbedOptions]) -> embed_pb2.EmbedResponse:
        """As GenerateClient.embed()."""
        return self._run(self._client.embed(inputs, **options))

    def classify(self, inputs: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ClassifyResponse:
        """As GenerateClient.classify()."""
        return self._run(self._client.classify(inputs, **options))

    def score(self, query: Prompt, documents: Prompts, **options: Unpack[HeadOptions]) -> embed_pb2.ScoreResponse:
        """As GenerateClient.score()."""
        return self._run(self._client.score(query, documents, **options))

    # -- the model and the cluster -------------------------------------------------------------------------------

    def get_model(self, timeout_s: float | None = None) -> model_pb2.GetModelResponse:
        """As GenerateClient.get_model()."""
        return self._run(self._client.get_model(timeout_s))

    def list_models(self, timeout_s: float | None = None) -> list[model_pb2.GetModelResponse]:
        """As GenerateClient.list_models()."""
        return self._run(self._client.list_models(timeout_s))

    def tokenize(
        self,
        prompt: str | Sequence[ChatTurn],
        timeout_s: float | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """As GenerateClient.tokenize()."""
        return self._run(self._client.tokenize(prompt, timeout_s, add_special_tokens=add_special_tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """As GenerateClient.detokenize()."""
        return self._run(
            self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, timeout_s=timeout_s)
        )

    def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """As GenerateClient.status()."""
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
        """As GenerateClient.scale()."""
        return self._run(
            self._client.scale(prefill=prefill, decode=decode, both=both, encode=encode, timeout_s=timeout_s)
        )

    def drain(self, engine_id: str, *, for_good: bool = False, timeout_s: float | None = None) -> None:
        """As GenerateClient.drain()."""
        self._run(self._client.drain(engine_id, for_good=for_good, timeout_s=timeout_s))

    def drain_node(self, node: str, timeout_s: float | None = None) -> list[str]:
        """As GenerateClient.drain_node()."""
        return self._run(self._client.drain_node(node, timeout_s))

    def update(self, model: str, timeout_s: float | None = None) -> int:
        """As GenerateClient.update()."""
        return self._run(self._client.update(model, timeout_s))

    def set_role(self, engine_id: str, role: str, timeout_s: float | None = None) -> None:
        """As GenerateClient.set_role()."""
        self._run(self._client.set_role(engine_id, role, timeout_s))

    def load_adapter(self, name: str, directory: str, timeout_s: float | None = None) -> str:
        """As GenerateClient.load_adapter()."""
        return self._run(self._client.load_adapter(name, directory, timeout_s))

    def unload_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """As GenerateClient.unload_adapter()."""
        self._run(self._client.unload_adapter(name, timeout_s))

    def reset_prefix_cache(
        self, engine_id: str = "", *, preempt: bool = False, timeout_s: float | None = None
    ) -> dict[str, bool]:
        """As GenerateClient.reset_prefix_cache()."""
        return self._run(self._client.reset_prefix_cache(engine_id, preempt=preempt, timeout_s=timeout_s))

    def profile(
        self, engine_id: str, duration_s: float, *, with_trace: bool = False, timeout_s: float | None = None
    ) -> admin_pb2.ProfileResponse:
        """As GenerateClient.profile()."""
        return self._run(self._client.profile(engine_id, duration_s, with_trace=with_trace, timeout_s=timeout_s))

    def rotate_secret(self, timeout_s: float | None = None) -> bool:
        """As GenerateClient.rotate_secret()."""
        return self._run(self._client.rotate_secret(timeout_s))

    # -- on the other thread -------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._thread.run(coroutine)
        except concurrent.futures.CancelledError:
            raise ClientClosed from None

    def _stream(self, items: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
        """What comes next is asked for only when it is wanted: a slow reader is one for the ingress too."""

        async def next_item() -> _T | None:
            return await anext(items, None)

        has_begun = False
        try:
            while (item := self._run(next_item())) is not None:
                has_begun = True
                yield item
        except LoopClosed:
            # Its answer ends like that of who waits for one just then.
            if has_begun:
                raise ClientClosed from None
            raise
        finally:
            self._thread.finish(items.aclose())


def generate_blocking(
    addresses: str | Sequence[str], prompt: Prompt, **options: Unpack[Options]
) -> Generator[generate_pb2.GenerateResponse, None, None]:
    """Stream the answer to one prompt, for programs that have no other; as BlockingClient.generate()."""
    with BlockingClient(addresses) as client:
        yield from client.generate(prompt, **options)
