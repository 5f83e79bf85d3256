"""Reads images as clients send them, and refuses some before they are decoded."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pybase64

from cluster.parameters.generation import ChatPrompt, GenerateRequest, ImageInput
from cluster.parameters.sampling_rules import Violations
from cluster.settings.images import ImageConfig

_BASE64_OVERHEAD: Final = 4 / 3
_MAX_URI_HEADER_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class SentImage:
    """One image of a request. field: the request's field that has it, for messages to the client"""

    field: str
    image: ImageInput


def images_of(request: GenerateRequest) -> list[SentImage]:
    """Return a request's images, in the order of their placeholders."""
    return [*_chat_images(request), *(SentImage(f"images[{i}]", image) for i, image in enumerate(request.images))]


def _chat_images(request: GenerateRequest) -> Iterator[SentImage]:
    if not isinstance(request.prompt, ChatPrompt):
        return
    for number, message in enumerate(request.prompt.messages):
        for index, part in enumerate(message.parts):
            if isinstance(part, ImageInput):
                yield SentImage(f"chat.messages[{number}].parts[{index}].image", part)


def check_images(request: GenerateRequest, config: ImageConfig | None, violations: Violations) -> None:
    """Check the number of images, their places and their sizes. config: None for a model that takes text only"""
    if isinstance(request.prompt, ChatPrompt):
        for number, message in enumerate(request.prompt.messages):
            if message.parts and message.content:
                violations.add(f"chat.messages[{number}]", "content and parts", "one of them")
        if request.images:
            violations.add("images", f"{len(request.images)} beside a chat", "images of a chat in its messages' parts")
    sent = images_of(request)
    if not sent:
        return
    if config is None:
        violations.add(sent[0].field, _count(sent), "none: the model takes text only")
    elif len(sent) > config.max_images:
        violations.add(sent[config.max_images].field, _count(sent), f"at most {config.max_images} images")
    else:
        for one in sent:
            num_bytes = int(
                max(len(one.image.data), len(one.image.data_uri) / _BASE64_OVERHEAD - _MAX_URI_HEADER_CHARS)
            )
            if num_bytes > config.max_image_kib << 10:
                violations.add(one.field, f"{num_bytes} bytes", f"at most {config.max_image_kib} KiB")
            elif not num_bytes and not one.image.data_uri:
                violations.add(one.field, "0 bytes", "an image's bytes, or a data URI")


def _count(sent: list[SentImage]) -> str:
    return "an image" if len(sent) == 1 else f"{len(sent)} images"


def read_data(image: ImageInput) -> bytes:
    """Return the bytes of an image's file. Raises ValueError for a data URI without base64."""
    if not image.data_uri:
        return image.data
    header, comma, data = image.data_uri.partition(",")
    if not comma or not header.startswith("data:") or not header.endswith(";base64"):
        raise ValueError("it is no data URI of the form data:image/png;base64,… (nothing is fetched from elsewhere)")
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its data URI is no base64: {error}") from error
