"""Asks a server what has to be known before it is measured: its models, and tokens to draw prompts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cluster.bench.prompts import Vocabulary, checked, words_among
from cluster.errors import CannotMeasure, InvalidConfig

_TIMEOUT_S: Final = 30.0
_ResponseT = TypeVar("_ResponseT")
_MAX_SHOWN_CHARS: Final = 300
_TEXT: Final = (
    "the house stood near the river and the old man went down to the water every morning because he liked to see how "
    "the boats came back from the sea with their fish while the children ran along the bank and called out names of "
    "birds that they knew from a book which their mother had read to them in winter when snow lay on all the roads "
    "and no one could go to school or work until the sun came out again over the white hills and small trees so that "
    "people could leave their rooms walk into town buy bread and eggs and tell each other what had been said about "
    "the weather this year last year and many years before that time in another part of this long green country where "
    "most things still grow slowly under rain light wind and cloud without much help from anyone who lives there now"
)
"""English of which the tokens of prompts are taken when the server tokenizes it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is called.

    base_url: the URL up to and including /v1
    headers:  what every call carries, such as the authorization
    """

    base_url: str
    headers: Mapping[str, str]

    @property
    def root_url(self) -> str:
        """The URL without /v1, where vLLM and raypd have /tokenize."""
        return self.base_url.removesuffix("/v1")


class ServedModel(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it. max_model_len: tokens of prompt and output together; None if it is not said"""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


def base_url_of(url: str) -> str:
    """Return a server's URL up to and including /v1. Raises InvalidConfig if it is no URL of http or https."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise InvalidConfig("--url", [f"{url!r} is no URL of a server, such as http://127.0.0.1:8000"])
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"


async def find_model(session: aiohttp.ClientSession, target: Target, name: str | None) -> ServedModel:
    """Return the served model of this name; without a name, the first one that is no adapter.

    Raises CannotMeasure if the server does not answer or serves nothing, InvalidConfig if it does not serve the name.
    """
    models = (await _call(session, "GET", f"{target.base_url}/models", target, None, _ModelList)).data
    if name is not None:
        found = next((model for model in models if model.id == name), None)
        if found is None:
            served = ", ".join(model.id for model in models) or "no model"
            raise InvalidConfig("--model", [f"{target.base_url} serves {served}, and not {name!r}"])
        return found
    if not models:
        raise CannotMeasure(f"{target.base_url} serves no model")
    return next((model for model in models if model.parent is None), models[0])


async def ask_vocabulary(session: aiohttp.ClientSession, target: Target, model: str) -> Vocabulary:
    """Return tokens of the served tokenizer, by its /tokenize. Raises InvalidConfig if the server has none."""
    body = {"model": model, "prompt": f" {_TEXT}", "add_special_tokens": False, "return_token_strs": True}
    try:
        answer = await _call(session, "POST", f"{target.root_url}/tokenize", target, body, _Tokenized)
    except CannotMeasure as error:
        needed = "name the folder of the model's tokenizer"
        raise InvalidConfig("--tokenizer", [f"{needed}, because the server does not tokenize: {error}"]) from error
    vocabulary = Vocabulary(sorted(set(answer.tokens)), words_among(answer.token_strs or []))
    return checked(vocabulary, f"{target.root_url}/tokenize")


async def _call(
    session: aiohttp.ClientSession, method: str, url: str, target: Target, body: object, answer: type[_ResponseT]
) -> _ResponseT:
    headers = {**target.headers, "content-type": "application/json"}
    data = None if body is None else msgspec.json.encode(body)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
            received = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise CannotMeasure(f"{method} {url} failed: {error or type(error).__name__}") from error
    if response.status != 200:
        raise CannotMeasure(f"{method} {url} was answered by {response.status}: {shortened(received)}")
    try:
        return msgspec.json.decode(received, type=answer)
    except msgspec.DecodeError as error:
        raise CannotMeasure(f"{method} {url} was answered by something else: {error}") from error


def shortened(body: bytes) -> str:
    """Return the beginning of an answer, on one line."""
    text = " ".join(body[: _MAX_SHOWN_CHARS * 4].decode(errors="replace").split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
