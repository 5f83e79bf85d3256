"""The handlers of the HTTP API: one method for each path. They use Serving, and nothing of gRPC."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Final
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from cluster.access.access_control import AccessControl
from cluster.access.caller import current_caller
from cluster.api.http.app import Call, Endpoint, Guards, Handler, ServerState, make_app
from cluster.api.http.errors import renamed
from cluster.api.http.live_page.page_handlers import LivePage, open_paths
from cluster.api.http.metrics_handlers import METRICS, VLLM_METRICS, MetricsHandlers
from cluster.api.http.open_streams import OpenStreams, StreamTimes
from cluster.api.http.openai.answers import Answer, AnswerHead, answer_id, chunks_of
from cluster.api.http.openai.chat import ChatAnswer
from cluster.api.http.openai.chat_prompt import prompt_to_tokenize
from cluster.api.http.openai.completions import CompletionAnswer, prompts_from
from cluster.api.http.openai.embeddings import embed_request, embedding_list
from cluster.api.http.openai.logprob_texts import TokenTexts
from cluster.api.http.openai.scoring import (
    classified_list,
    classify_request,
    comparison_of,
    renamed_inputs,
    reranked_list,
    score_list,
)
from cluster.api.http.openapi import Operation, openapi, page
from cluster.api.http.receiving.body_counts import check_counts
from cluster.api.http.receiving.hosts import AllowedHosts
from cluster.api.http.receiving.instant_answers import Maker
from cluster.api.http.receiving.reading import BodyT
from cluster.api.http.requests import (
    ChatCompletionRequest,
    ClassifyBody,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankBody,
    ScoreBody,
    TokenizeRequest,
    WorkBody,
)
from cluster.api.http.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ClassifiedList,
    Completion,
    Detokenized,
    EmbeddingList,
    Health,
    Model,
    ModelList,
    RerankedList,
    ScoreList,
    Tokenized,
    Version,
)
from cluster.api.http.sampling import NAMES
from cluster.api.http.streams import EventStream, events_of
from cluster.api.shared.calls_in_progress import CallsInProgress
from cluster.api.shared.version import server_version
from cluster.errors import FieldViolation, InvalidRequest, NoEngineAvailable
from cluster.observability.status import ClusterView
from cluster.observability.vllm_dialect import VllmDialect
from cluster.parameters.generation import Prompt, TextPrompt, TokenPrompt
from cluster.requests.serving import Serving
from cluster.settings.http import HttpConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_tokenizer import ModelTokenizer

_INPUT_NAMES: Final = {"inputs": "input"}
_SCORE_NAMES: Final = {"query": "text_1", "documents": "text_2"}

_COMPLETIONS: Final = Operation(
    "/v1/completions", "POST", "Complete prompts.", CompletionRequest, Completion, Completion
)
_CHAT: Final = Operation(
    "/v1/chat/completions",
    "POST",
    "Generate the next message of a conversation.",
    ChatCompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
)
_EMBEDDINGS: Final = Operation(
    "/v1/embeddings", "POST", "Compute the embeddings of texts.", EmbeddingRequest, EmbeddingList
)
_CLASSIFY: Final = Operation(
    "/classify", "POST", "Classify texts with the model's classification head.", ClassifyBody, ClassifiedList
)
_SCORES: Final = [
    Operation(path, "POST", "Score how well texts match another text.", ScoreBody, ScoreList)
    for path in ("/score", "/v1/score")
]
_RERANKS: Final = [
    Operation(path, "POST", "Rank documents by how well they answer a query.", RerankBody, RerankedList)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
]
_MODELS: Final = Operation("/v1/models", "GET", "List the model and its adapters.", None, ModelList)
_MODEL: Final = Operation(
    "/v1/models/{model}", "GET", "Describe a model.", None, Model, None, (401, 403, 404, 421, 429, 500, 503), ("model",)
)
_TOKENIZE: Final = Operation("/tokenize", "POST", "Return the tokens of a prompt.", TokenizeRequest, Tokenized)
_DETOKENIZE: Final = Operation("/detokenize", "POST", "Return the text of tokens.", DetokenizeRequest, Detokenized)
_HEALTH: Final = Operation("/health", "GET", "Whether this process is alive.", None, Health, None, ())
_READY: Final = Operation("/ready", "GET", "Whether requests can be served now.", None, Health, None, (503,))
_PINGS: Final = [
    Operation("/ping", method, "The same as /health, at the path that some platforms probe.", None, Health, None, ())
    for method in ("GET", "POST")
]
_PROBES: Final = (_HEALTH, _READY, *_PINGS)
_VERSION: Final = Operation("/version", "GET", "Return raypd's version.", None, Version)
_OPENAPI: Final = Operation("/openapi.json", "GET", "This document.", None, None, None, ())
_PAGE: Final = Operation("/docs", "GET", "This document as a web page.", None, None, None, ())
OPERATIONS: Final = (
    *(_COMPLETIONS, _CHAT, _EMBEDDINGS, _CLASSIFY, *_SCORES, *_RERANKS, _MODELS, _MODEL, _TOKENIZE, _DETOKENIZE),
    *(_HEALTH, _READY, *_PINGS, _VERSION, METRICS, VLLM_METRICS),
)


class HttpHandlers:
    """The handlers of all paths."""

    def __init__(
        self,
        serving: Serving,
        view: Callable[[], Awaitable[ClusterView]],
        config: HttpConfig,
        slow_reader_timeout_s: float,
        dialect: VllmDialect | None = None,
    ) -> None:
        """Keep what the handlers use.

        view: makes a view of the cluster as it was lately, without asking another process
        slow_reader_timeout_s: a client that reads nothing of its stream for this long is cut off, in seconds
        dialect: adds metrics under vLLM's names; None: there are none
        """
        self._metrics = MetricsHandlers(serving.metrics, view, dialect)
        self._serving = serving
        self._config = config
        self.streams = OpenStreams(StreamTimes(slow_reader_timeout_s, config.keep_alive_interval_s))
        """The open streams; the server calls its run()."""
        self._started_s = int(time.time())
        _document(), _page()
        self._texts: WeakKeyDictionary[ModelTokenizer, TokenTexts] = WeakKeyDictionary()

    def instant_answers(self) -> Mapping[str, Maker]:
        """Return what makes the bodies of GET calls that are too cheap and frequent for app(), by their path."""
        return {VLLM_METRICS.path: self._metrics.vllm_text}

    def app(
        self, access: AccessControl, in_progress: CallsInProgress, hosts: AllowedHosts, live_page: LivePage
    ) -> Starlette:
        """Return the ASGI application. hosts: the hosts that calls may name"""
        state = ServerState(in_progress, self._config)

        def route(operation: Operation, handler: Handler, *, is_work: bool = True) -> Route:
            endpoint = Endpoint(handler, state, has_body=operation.body is not None, is_work=is_work)
            path = operation.path.replace("{model}", "{model:path}")
            return Route(path, endpoint, methods=[operation.method])

        return make_app(
            [
                route(_COMPLETIONS, self.complete),
                route(_CHAT, self.chat),
                route(_EMBEDDINGS, self.embed),
                route(_CLASSIFY, self.classify),
                *(route(operation, self.score) for operation in _SCORES),
                *(route(operation, self.rerank) for operation in _RERANKS),
                route(_MODELS, self.models),
                route(_MODEL, self.model),
                route(_TOKENIZE, self.tokenize),
                route(_DETOKENIZE, self.detokenize),
                route(_HEALTH, self.health, is_work=False),
                route(_READY, self.ready),
                *(route(operation, self.health, is_work=False) for operation in _PINGS),
                route(_VERSION, self.version, is_work=False),
                route(METRICS, self._metrics.metrics, is_work=False),
                route(VLLM_METRICS, self._metrics.vllm_metrics, is_work=False),
                route(_OPENAPI, self.describe, is_work=False),
                route(_PAGE, self.page, is_work=False),
                *live_page.routes(state),
            ],
            Guards(
                access,
                hosts,
                open_paths=frozenset(operation.path for operation in (*_PROBES, _OPENAPI, _PAGE)) | open_paths(),
                probed_paths=frozenset(operation.path for operation in _PROBES),
                allowed_origins=self._config.allowed_origins,
            ),
            self._serving.metrics.on_http,
        )

    async def complete(self, call: Call) -> Response:
        """Answer /v1/completions."""
        body = await self._read(call, CompletionRequest)
        head = self._head("cmpl", body)
        echoes = [await self._text_of(prompt) for prompt in prompts_from(body.prompt)] if body.echo else []
        answer = CompletionAnswer(head, body, echoes, self._texts_of)
        return await self._generate(head, answer, call.time_left_s(body.timeout), is_stream=bool(body.stream))

    async def chat(self, call: Call) -> Response:
        """Answer /v1/chat/completions."""
        body = await self._read(call, ChatCompletionRequest)
        head = self._head("chatcmpl", body)
        answer = ChatAnswer(head, body, self._texts_of, self._config)
        return await self._generate(head, answer, call.time_left_s(body.timeout), is_stream=bool(body.stream))

    async def embed(self, call: Call) -> Response:
        """Answer /v1/embeddings."""
        body = await self._read(call, EmbeddingRequest)
        head = self._head("embd", body)
        try:
            result = await self._serving.embed(embed_request(head, body, call.time_left_s(body.timeout)))
        except InvalidRequest as error:
            raise renamed_inputs(error, _INPUT_NAMES) from error
        as_base64 = body.encoding_format == "base64"
        return _json(embedding_list(head, result, as_base64=as_base64), head.id)

    async def classify(self, call: Call) -> Response:
        """Answer /classify."""
        body = await self._read(call, ClassifyBody)
        head = self._head("classify", body)
        request = classify_request(head, body, call.time_left_s(body.timeout))
        try:
            result = await self._serving.classify(request)
        except InvalidRequest as error:
            raise renamed_inputs(error, _INPUT_NAMES) from error
        return _json(classified_list(head, result), head.id)

    async def score(self, call: Call) -> Response:
        """Answer /score."""
        body = await self._read(call, ScoreBody)
        head = self._head("score", body)
        comparison = comparison_of(head, body, call.time_left_s(body.timeout))
        try:
            scores, usage = await comparison.scores(self._serving)
        except InvalidRequest as error:
            raise renamed_inputs(error, _SCORE_NAMES) from error
        return _json(score_list(head, scores, usage), head.id)

    async def rerank(self, call: Call) -> Response:
        """Answer /rerank."""
        body = await self._read(call, RerankBody)
        head = self._head("rerank", body)
        scores, usage = await comparison_of(head, body, call.time_left_s(body.timeout)).scores(self._serving)
        return _json(reranked_list(head, body, scores, usage), head.id)

    async def models(self, call: Call) -> Response:
        """Answer /v1/models with the model, and the adapters that are known and that the caller may use."""
        del call
        model = self._model()
        adapters = [
            msgspec.structs.replace(model, id=adapter.name, parent=model.id)
            for adapter in self._processor.adapters.known_to(current_caller())
        ]
        return _json(ModelList([model, *adapters]))

    async def model(self, call: Call) -> Response:
        """Answer /v1/models/{model}."""
        name, model = call.request.path_params["model"], self._model()
        if name != model.id:
            await self._processor.find_adapter(name, "", current_caller())
            model = msgspec.structs.replace(model, id=name, parent=model.id)
        return _json(model)

    async def tokenize(self, call: Call) -> Response:
        """Answer /tokenize."""
        body = await self._read(call, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest(FieldViolation("prompt", "given with messages, or without", "one of both"))
        processor = self._processor
        processor.check_model(body.model, current_caller())
        prompt: Prompt = (
            TextPrompt(body.prompt) if body.prompt is not None else prompt_to_tokenize(body, body.messages or ())
        )
        try:
            token_ids = await processor.tokenize(prompt, body.add_special_tokens)
        except InvalidRequest as error:
            raise renamed(error, NAMES) from error
        tokenized = Tokenized(token_ids, len(token_ids), processor.model.max_model_len)
        if body.return_token_strs:
            backend = processor.tokenizer.backend
            tokenized = msgspec.structs.replace(
                tokenized, token_strs=[backend.id_to_token(token_id) or "" for token_id in token_ids]
            )
        return _json(tokenized)

    async def detokenize(self, call: Call) -> Response:
        """Answer /detokenize."""
        body = await self._read(call, DetokenizeRequest)
        self._processor.check_model(body.model, current_caller())
        return _json(Detokenized(await self._detokenize(body.tokens, "tokens")))

    async def health(self, call: Call) -> Response:
        """Answer /health and /ping, which tell whether this process lives."""
        del call
        return _json(Health("ok"))

    async def ready(self, call: Call) -> Response:
        """Answer /ready, which tells whether requests would be served."""
        del call
        if not self._serving.served_versions():
            raise NoEngineAvailable
        return _json(Health("ready"))

    async def version(self, call: Call) -> Response:
        """Answer /version with raypd's version, in the shape of vLLM's answer."""
        del call
        return _json(Version(server_version()))

    async def describe(self, call: Call) -> Response:
        """Answer /openapi.json."""
        del call
        return Response(_document(), 200, media_type="application/json")

    async def page(self, call: Call) -> Response:
        """Answer /docs."""
        del call
        return Response(_page(), 200, media_type="text/html")

    async def _read(self, call: Call, kind: type[BodyT]) -> BodyT:
        body = await call.read(kind)
        check_counts(body, self._processor.limits)
        return body

    async def _generate(
        self, head: AnswerHead, answer: Answer, timeout_s: float | None, *, is_stream: bool
    ) -> Response:
        chunks = chunks_of(self._serving, answer.request, timeout_s)
        if is_stream:
            return EventStream(head.id, answer.names, events_of(answer, chunks), self.streams)
        try:
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    answer.add(index, chunk)
        except InvalidRequest as error:
            raise renamed(error, answer.names) from error
        return _json(answer.whole(), head.id)

    def _head(self, prefix: str, body: WorkBody) -> AnswerHead:
        return AnswerHead(answer_id(prefix, body), int(time.time()), body.model or self._processor.model.name)

    def _model(self) -> Model:
        model = self._processor.model
        defaults = {name: value for name, value in asdict(model.defaults).items() if value is not None}
        return Model(model.name, self._started_s, model.max_model_len, sampling_defaults=defaults or msgspec.UNSET)

    @property
    def _processor(self) -> InputProcessor:
        return self._serving.newest_model().input_processor

    async def _text_of(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt)
        return await self._detokenize(prompt.token_ids, "prompt")

    async def _detokenize(self, token_ids: list[int], field: str) -> str:
        try:
            return await self._processor.detokenize(token_ids, skip_special_tokens=False)
        except InvalidRequest as error:
            raise renamed(error, {"token_ids": field}) from error

    def _texts_of(self, model_version: int) -> TokenTexts:
        model = self._serving.model(model_version) or self._serving.newest_model()
        tokenizer = model.input_processor.tokenizer
        if (texts := self._texts.get(tokenizer)) is None:
            texts = self._texts[tokenizer] = TokenTexts(tokenizer.backend)
        return texts


@functools.cache
def _document() -> str:
    """Return the document as JSON. It is made once, because it needs no token and so may be asked for often."""
    return json.dumps(openapi(OPERATIONS))


@functools.cache
def _page() -> str:
    return page(openapi(OPERATIONS))


def _json(value: msgspec.Struct, request_id: str = "") -> Response:
    headers = {"x-request-id": request_id} if request_id else None
    return Response(msgspec.json.encode(value), 200, headers, "application/json")
