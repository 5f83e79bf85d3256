"""The types of prompts and options of requests for text, and the messages that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.sampling_keywords import SamplingKeywords

Content = str | Sequence[str | bytes]
"""The content of one turn: a text, or texts and images (the bytes of their files) in their order."""

ChatTurn = tuple[str, Content]
"""A turn of a conversation: (role, content), such as ("user", "Hello")."""

Prompt = str | Sequence[int] | Sequence[ChatTurn] | generate_pb2.PromptEmbeds
"""A prompt: a text, token ids, a conversation, or embeddings."""


class Sampling(SamplingKeywords, total=False):
    """The sampling parameters, and the form of the output: at most one of the five fields below.

    json_schema: a JSON schema as JSON text, which the output has to satisfy
    json_object: True: the output has to be a JSON object
    regex:       a regular expression that the whole output has to match
    choice:      texts, one of which the output has to be
    grammar:     an EBNF grammar, from whose rule "root" the output has to be derived
    """

    json_schema: str
    json_object: bool
    regex: str
    choice: Sequence[str] | generate_pb2.Choices
    grammar: str


class Aims(TypedDict, total=False):
    """Service-level aims: milliseconds to the first token, and from a token to the next one."""

    ttft_ms: float
    itl_ms: float


class BatchOptions(Sampling, total=False):
    """The options of batches and of single requests: fields of raypd.v1.GenerateRequest, and timeout_s and resume.

    images:    the files' bytes of the images of a text or of token ids, which have a placeholder for each image; a
               conversation has its images in its turns. In a batch every prompt has the same images
    slo:       the request's aims, by which the server chooses its engines; absent: those of the token or the cluster
    timeout_s: seconds for the whole answer, including waits and further calls; None or absent: no limit
    resume:    True or absent: a request whose call fails goes on in a further call; False: the client makes one call,
               and raises CallFailed if it fails
    """

    request_id: str
    model: str
    lora_name: str
    lora_digest: str
    priority: int
    cache_salt: str
    slo: Aims
    model_version: int
    truncate_prompt_tokens: int
    add_special_tokens: bool
    images: Sequence[bytes]
    timeout_s: float | None
    resume: bool


class Options(BatchOptions, total=False):
    """The options of a request with a single prompt.

    output_token_ids: the output that the caller already has; the answer goes on at the next position
    """

    output_token_ids: Sequence[int]


_REQUEST_FIELDS: Final = frozenset(Options.__annotations__) - frozenset(Sampling.__annotations__)


_LISTS_OF_TEXTS: Final = {"choice"} | {
    name for name, hint in SamplingKeywords.__annotations__.items() if hint.__forward_arg__ == "str | Sequence[str]"
}


def make_request(prompt: Prompt, options: Options) -> generate_pb2.GenerateRequest:
    """Make the message of a request; timeout_s and resume have no field in it.

    Raises ValueError or TypeError for an option that does not exist or whose field cannot hold the value.
    """
    message = _make_each(options)
    set_prompt(message, prompt)
    return message


def make_batch_request(
    prompts: Iterable[Prompt], n: int, best_of: int | None, options: BatchOptions
) -> generate_pb2.GenerateBatchRequest:
    """Make the message of a batch; timeout_s and resume have no field in it.

    Raises ValueError or TypeError as make_request() does; TypeError also if prompts is a single text.
    """
    if isinstance(prompts, str):
        raise TypeError("a batch has several prompts; for one, put it into a list")
    message = generate_pb2.GenerateBatchRequest(n=n, best_of=best_of, each=_make_each(options))
    for prompt in prompts:
        set_prompt(message.prompts.add(), prompt)
    return message


def _make_each(options: BatchOptions) -> generate_pb2.GenerateRequest:
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in ("timeout_s", "resume")}
    of_request = {name: fields.pop(name) for name in _REQUEST_FIELDS & fields.keys()}
    if "images" in of_request:
        of_request["images"] = [generate_pb2.Image(data=image) for image in of_request["images"]]
    return generate_pb2.GenerateRequest(sampling_params=make_sampling_params(fields), **of_request)


def make_sampling_params(fields: Mapping[str, Any]) -> generate_pb2.SamplingParams:
    """Make the message of sampling parameters, by the names of its fields.

    Raises ValueError for a field that does not exist, TypeError for one that cannot hold its value.
    """
    values = dict(fields)
    for name in _LISTS_OF_TEXTS & values.keys():
        if isinstance(values[name], str):
            values[name] = [values[name]]  # protobuf would take a single text as a list of its characters.
    try:
        if isinstance(values.get("choice"), Sequence):
            values["choice"] = generate_pb2.Choices(choices=values["choice"])
        return generate_pb2.SamplingParams(**values)
    except TypeError as error:
        if len(fields) == 1:
            raise TypeError(
                "".join(f"{name} cannot be {value!r}: {error}" for name, value in fields.items())
            ) from error
        for name, value in fields.items():
            make_sampling_params({name: value})
        raise


def set_prompt(message: generate_pb2.GenerateRequest | generate_pb2.Prompt, prompt: Prompt) -> None:
    """Write a prompt into a message."""
    if isinstance(prompt, str):
        message.text = prompt
        return
    if isinstance(prompt, generate_pb2.PromptEmbeds):
        message.prompt_embeds.CopyFrom(prompt)
        return
    message.token_ids.SetInParent()  # The server's refusal of an empty prompt then names token_ids; a chat replaces it.
    for item in prompt:
        if isinstance(item, tuple):
            role, content = item
            turn = message.chat.messages.add(role=role)
            if isinstance(content, str):
                turn.content = content
            else:
                turn.parts.extend(_part(part) for part in content)
        else:
            message.token_ids.ids.append(item)


def _part(part: str | bytes) -> generate_pb2.ContentPart:
    if isinstance(part, str):
        return generate_pb2.ContentPart(text=part)
    return generate_pb2.ContentPart(image=generate_pb2.Image(data=part))
