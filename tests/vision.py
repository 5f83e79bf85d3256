"""Small seeded vision-language checkpoints, images, and transformers' own answers about them."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from actors.core.requests.multimodal import EncoderInput, MultiModalFeature, ProcessedImage
from actors.engine_server import EngineServer
from actors.model.multimodal.image_batch import ImageBatch
from actors.model.multimodal.processing import ImageProcessing
from cluster.images import prompt_images
from cluster.images.errors import ImageRefused
from cluster.images.processor_child import answer
from cluster.images.processor_process import PROCESSED, ChildGreeting
from cluster.images.prompt_images import PlacedImages
from cluster.settings.images import ImageConfig
from tests.checkpoints import EOS_TOKEN, EOS_TOKEN_ID, MAX_POSITIONS, VOCAB_SIZE, draw_weights, train_tokenizer

VISION_FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl")
IMAGE_TOKEN_ID = VOCAB_SIZE
PATCH_SIZE = 4

_SPECIAL_TOKENS = {
    "llava": ["<image>"],
    "qwen2_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "qwen2_5_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
}
_TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 8,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}
_QWEN_TEXT = _TEXT_CONFIG | {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": IMAGE_TOKEN_ID + 1,
    "vision_start_token_id": IMAGE_TOKEN_ID + 2,
    "vision_end_token_id": IMAGE_TOKEN_ID + 3,
}
_PATCHES = {"patch_size": PATCH_SIZE, "spatial_merge_size": 2, "temporal_patch_size": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": PATCH_SIZE,
            "projection_dim": 32,
        },
        "text_config": _TEXT_CONFIG | {"model_type": "llama"},
        "image_token_id": IMAGE_TOKEN_ID,
        "vision_feature_layer": -1,
        "image_seq_length": 16,
    },
    "qwen2_vl": {
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2, "num_heads": 2} | _PATCHES,
        "text_config": _QWEN_TEXT,
    }
    | _QWEN_TOKENS,
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        }
        | _PATCHES,
        "text_config": _QWEN_TEXT,
    }
    | _QWEN_TOKENS,
}
_CHAT_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def image_marker(family: str) -> str:
    """Return what stands for an image in a text."""
    return "<image>" if family == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"


def make_vision_checkpoint(family: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a small float32 checkpoint with its tokenizer and processor into a directory, and return that."""
    config = CONFIG_MAPPING[family](**copy.deepcopy(_CONFIGS[family]))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    draw_weights(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)
    template = _CHAT_TEMPLATE.format(image=image_marker(family))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=copy.deepcopy(train_tokenizer()),
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        chat_template=template,
        additional_special_tokens=_SPECIAL_TOKENS[family],
    )
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        LlavaProcessor(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            images,
            tokenizer,
            patch_size=PATCH_SIZE,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        ).save_pretrained(directory)
    else:
        tokenizer.save_pretrained(directory)
        Qwen2VLImageProcessorPil(
            patch_size=PATCH_SIZE,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
        ).save_pretrained(directory)
    return directory


def draw_image(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """A coarse random picture: its patches differ."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


class ProcessorsInProcess:
    """An ImageProcessors without a process, which takes seconds to start."""

    def __init__(self, directory: Path, config: ImageConfig) -> None:
        self._processing = _processing_of(directory)
        self._greeting = ChildGreeting(str(directory), config.max_pixels, config.formats)
        self.num_processed = 0

    async def process(self, data: bytes) -> ProcessedImage:
        self.num_processed += 1
        message = answer(self._processing, data, self._greeting)
        if message[:1] != PROCESSED:
            raise ImageRefused(message[1:].decode())
        return msgspec.msgpack.decode(message[1:], type=ProcessedImage)

    def close(self) -> None:
        pass


_processing_of = functools.cache(ImageProcessing)


def place_images(directory: Path, prompt: list[int], images: list[Image.Image]) -> PlacedImages:
    """A prompt that has its images' placeholders already, as an engine is given it."""
    features: list[MultiModalFeature] = []
    inputs: dict[str, EncoderInput] = {}
    end = 0
    for image in images:
        processed = _processing_of(directory).process(image)
        name = hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()
        offset = prompt.index(IMAGE_TOKEN_ID, end)
        end = offset + processed.num_tokens
        features.append(MultiModalFeature(name, offset, processed.num_tokens, processed.num_tokens, processed.grid))
        inputs[name] = EncoderInput(name, processed.arrays)
    return PlacedImages(prompt, tuple(features), tuple(inputs.values()))


@contextmanager
def processing_in_process() -> Iterator[None]:
    """Inside, images are worked on in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_images, "ImageProcessors", ProcessorsInProcess)
        yield


def num_encoded_by(engine: EngineServer) -> int:
    """Images that an engine has encoded for its own requests."""
    core = engine._core
    assert core is not None
    executor: Any = core.executor
    images = getattr(executor, "_executor", executor)._worker.runner._images
    assert isinstance(images, ImageBatch)
    return images.num_encoded


def encode_png(image: Image.Image) -> bytes:
    """Encode it as a client sends it."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True)
class VisionReference:
    """The stock model with its stock processing."""

    directory: Path
    family: str

    @functools.cached_property
    def _model(self) -> Any:  # a class that transformers chooses at run time
        model = AutoModelForImageTextToText.from_pretrained(
            self.directory, dtype=torch.float32, attn_implementation="eager"
        )
        model.generation_config.eos_token_id = None
        return model

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.directory)

    @functools.cached_property
    def _image_processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self.directory)  # type: ignore[no-untyped-call]  # left untyped

    def chat_text(self, messages: list[dict[str, Any]]) -> str:
        """A conversation as the chat template renders it."""
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def prompt(self, text: str, images: list[Image.Image]) -> list[int]:
        """Token ids with each image's placeholders, as transformers' processors write them into the text."""
        token = _SPECIAL_TOKENS[self.family][0]
        pieces = text.split(token)
        assert len(pieces) == len(images) + 1
        expanded = pieces[0]
        for image, piece in zip(images, pieces[1:], strict=True):
            expanded += token * self._count(image) + piece
        ids: list[int] = self._tokenizer(expanded, add_special_tokens=False)["input_ids"]
        return ids

    def greedy(self, prompt: list[int], images: list[Image.Image], num_tokens: int) -> list[int]:
        """The next tokens by generate(), end-of-sequence ignored."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images:
            inputs |= self._image_processor(images=images, return_tensors="pt")
            if self.family != "llava":
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN_ID).int()
        tokens = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        output: list[int] = tokens[0, len(prompt) :].tolist()
        return output

    def _count(self, image: Image.Image) -> int:
        if self.family == "llava":
            return (16 // PATCH_SIZE) ** 2
        grid = self._image_processor(images=[image], return_tensors="np")["image_grid_thw"][0]
        return int(grid.prod()) // 4
