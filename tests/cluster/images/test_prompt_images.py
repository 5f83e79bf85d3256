"""Requests with images: what engines are given, and what is refused.

Tests of cluster/images/image_support.py, cluster/images/sources.py, actors/process/sized_cache.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.core.requests.request import EngineCoreRequest
from cluster.errors import InvalidRequest
from cluster.images.image_support import open_prompt_images
from cluster.images.prompt_images import PromptImages
from cluster.parameters.generation import ChatMessage, ChatPrompt, GenerateRequest, ImageInput, TextPrompt, TokenPrompt
from cluster.settings.images import ImageConfig
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from tests.vision import (
    IMAGE_TOKEN_ID,
    ProcessorsInProcess,
    VisionReference,
    draw_image,
    encode_png,
    image_marker,
    processing_in_process,
)

CheckpointOf = Callable[[str], Path]
PNG = encode_png(draw_image(1))
LIMITS = ImageConfig(max_images=2, max_image_kib=16, max_pixels=4_000, max_image_tokens=20, max_input_mib=1)


@pytest.fixture(autouse=True)
def in_process() -> Iterator[None]:
    with processing_in_process():
        yield


def processor_of(directory: Path, limits: ImageConfig = LIMITS) -> InputProcessor:
    description = ModelDescription("m", max_model_len=200, vocab_size=392, eos_token_ids=(0,))
    tokenizer = ModelTokenizer.from_directory(directory, use_fastokens=True)
    return InputProcessor(description, tokenizer, images=open_prompt_images(directory, limits))


@pytest.fixture
def qwen(checkpoint: CheckpointOf) -> InputProcessor:
    return processor_of(checkpoint("qwen2_5_vl"))


def text(prompt: str, *images: bytes) -> GenerateRequest:
    return GenerateRequest(prompt=TextPrompt(prompt), images=tuple(map(ImageInput, images)))


MARKER = image_marker("qwen2_5_vl")


async def refusal(processor: InputProcessor, request: GenerateRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await processor.process(request)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
async def test_all_forms_of_a_prompt_become_what_transformers_makes_of_it(
    family: str, checkpoint: CheckpointOf
) -> None:
    directory = checkpoint(family)
    processor, reference = processor_of(directory), VisionReference(directory, family)
    images, marker = [draw_image(1), draw_image(2, 32, 32)], image_marker(family)
    sent = tuple(ImageInput(encode_png(image)) for image in images)
    uri = "data:image/png;base64," + base64.b64encode(sent[1].data).decode()
    words = f"See {marker} and {marker}."
    token_ids = processor.tokenizer.encode(words)
    assert token_ids.count(IMAGE_TOKEN_ID) == 2
    requests = [
        GenerateRequest(prompt=TextPrompt(words), images=sent),
        GenerateRequest(prompt=TokenPrompt(token_ids), images=(sent[0], ImageInput(data_uri=uri))),
    ]
    made = [await processor.process(request) for request in requests]
    for request in made:
        assert request.prompt_token_ids == reference.prompt(words, images)
        assert [feature.mm_hash for feature in request.mm_features] == [i.mm_hash for i in request.encoder_inputs]
        assert request.mm_features == made[0].mm_features
        assert request.encoder_inputs == made[0].encoder_inputs
    parts = ("See ", sent[0], " and ", sent[1], ".")
    shown = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    chat = await processor.process(GenerateRequest(prompt=ChatPrompt([ChatMessage("user", "", parts=parts)])))
    rendered = reference.chat_text([{"role": "user", "content": shown}])
    assert chat.prompt_token_ids == reference.prompt(rendered, images)
    assert chat.encoder_inputs == made[0].encoder_inputs


async def test_an_image_is_worked_on_once(qwen: InputProcessor) -> None:
    async def ask(salt: str = "") -> EngineCoreRequest:
        return await qwen.process(replace(text(f"{MARKER}{MARKER}", PNG, PNG), cache_salt=salt))

    first, again, salted = await ask(), await ask(), await ask("s")
    assert first.mm_features == again.mm_features
    assert len(first.encoder_inputs) == 1
    assert first.mm_features[0].mm_hash != salted.mm_features[0].mm_hash, "nobody learns what others have shown"
    assert num_processed(qwen) == 2


def num_processed(processor: InputProcessor) -> int:
    images = processor.images
    assert isinstance(images, PromptImages)
    processors: object = images._processors
    assert isinstance(processors, ProcessorsInProcess)
    return processors.num_processed


def jpeg() -> bytes:
    buffer = io.BytesIO()
    draw_image(3).save(buffer, "JPEG")
    return buffer.getvalue()


def gif() -> bytes:
    buffer = io.BytesIO()
    draw_image(3).save(buffer, "GIF")
    return buffer.getvalue()


def bomb() -> bytes:
    """Return an image of a hundred bytes that claims to have 900 million pixels."""
    pieces = [(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in pieces
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def animation() -> bytes:
    buffer = io.BytesIO()
    draw_image(3).save(buffer, "WEBP", save_all=True, append_images=[draw_image(4)])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (PNG[: len(PNG) // 2], "an image that can be read: "),
        (b"no image", "no image in a format that is read here (PNG, JPEG, WEBP)"),
        (gif(), "no image in a format that is read here"),
        (animation(), "2 frames, and animations are not taken"),
        (encode_png(draw_image(1, 100, 100)), "100 x 100 pixels, and at most 4000 are allowed"),
        (encode_png(draw_image(1, 2, 1000)), "aspect ratio"),
        (encode_png(draw_image(1, 48, 48)), "an image of 36 tokens; allowed: at most 20 tokens"),
        (bomb(), "DOS"),
        (b"", "0 bytes"),
        (b"x" * 20_000, "20000 bytes; allowed: at most 16 KiB"),
    ],
    ids=["truncated", "no image", "format", "animation", "pixels", "shape", "tokens", "bomb", "empty", "bytes"],
)
async def test_bad_images_are_refused(image: bytes, words: str, qwen: InputProcessor) -> None:
    message = await refusal(qwen, text(f"{MARKER}{MARKER}", jpeg(), image))
    assert words in message
    assert "images[1]" in message
    assert "images[0]" not in message


async def test_the_bytes_of_a_refused_image_are_freed_without_a_collection(qwen: InputProcessor) -> None:
    """An ingress collects seldom, and clients can send images of 8 MiB as fast as they are refused."""
    image = bytes(10_000)

    async def send() -> None:
        with contextlib.suppress(InvalidRequest):
            await qwen.process(text(MARKER, image))
        await asyncio.sleep(0)

    gc.disable()
    try:
        num_references = sys.getrefcount(image)
        await send()
        assert sys.getrefcount(image) == num_references
    finally:
        gc.enable()


async def test_what_does_not_fit_together_is_refused(qwen: InputProcessor) -> None:
    assert "3 images" in await refusal(qwen, text(MARKER * 3, PNG, PNG, PNG))
    assert "2 image placeholders" in await refusal(qwen, text(MARKER * 2, PNG))
    assert "0 image placeholders" in await refusal(qwen, text("nothing to see", PNG))
    assert "1 image placeholders" in await refusal(qwen, text(MARKER))
    long = "word " * 180
    assert "tokens long" in await refusal(qwen, text(long + MARKER, PNG))
    both = ChatMessage("user", "hello", parts=("hello",))
    assert "content and parts" in await refusal(qwen, GenerateRequest(prompt=ChatPrompt([both])))
    beside = GenerateRequest(prompt=ChatPrompt([ChatMessage("user", "hello")]), images=(ImageInput(PNG),))
    assert "beside a chat" in await refusal(qwen, beside)
    for uri, words in {
        "https://example.com/cat.png": "nothing is fetched",
        "data:image/png,hello": "nothing is fetched",
        "data:image/png;base64,%%%": "no base64",
    }.items():
        request = GenerateRequest(prompt=TextPrompt(MARKER), images=(ImageInput(data_uri=uri),))
        assert words in await refusal(qwen, request)
    assert num_processed(qwen) == 1, "the rest is refused before anything looks into an image"


async def test_too_much_for_the_encoder_is_refused(checkpoint: CheckpointOf) -> None:
    processor = processor_of(checkpoint("llava"), ImageConfig(max_images=400, max_input_mib=1))
    images = [encode_png(draw_image(seed, 32, 32)) for seed in range(2)]
    # Of 16 x 16 pixels in float32, each once per image that is shown.
    request = text("<image>" * 2, *images)
    assert sum(item.size_bytes for item in (await processor.process(request)).encoder_inputs) == 2 * 3 * 16 * 16 * 4
    many = [encode_png(draw_image(seed, 16, 16)) for seed in range(400)]
    assert "as the encoder is given them" in await refusal(processor, text("<image>" * 400, *many))


async def test_a_model_of_text_only_takes_no_images(checkpoint: CheckpointOf) -> None:
    processor = processor_of(checkpoint("llama"))
    assert processor.images is None
    assert "an image" in (message := await refusal(processor, text("hello", PNG)))
    assert "the model takes text only" in message
    chat = ChatPrompt([ChatMessage("user", "", parts=("see", ImageInput(PNG)))])
    assert "chat.messages[0].parts[1].image" in await refusal(processor, GenerateRequest(prompt=chat))
