"""Converts a request's images to the inputs of its engines' encoders, and puts them into the prompt.

An image is processed once for all requests that have it. Results are cached by a digest of the image's bytes, of the
processor's settings and of the request's cache salt; the engines' caches use the same digest as the image's name.
Refusals are not cached: a broken image that is sent again is processed again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.core.requests.multimodal import EncoderInput, MultiModalFeature, ProcessedImage
from actors.process.sized_cache import SizedCache
from cluster.errors import Overloaded
from cluster.images.errors import ImageRefused, ImagesUnavailable
from cluster.images.processor_process import ImageProcessors
from cluster.images.sources import SentImage, images_of, read_data
from cluster.parameters.generation import GenerateRequest
from cluster.parameters.sampling_rules import Violations
from cluster.settings.images import ImageConfig

_PROCESSOR_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
_RETRY_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """A prompt, in which each image has its tokens."""

    token_ids: list[int]
    features: tuple[MultiModalFeature, ...] = ()
    encoder_inputs: tuple[EncoderInput, ...] = ()


class PromptImages:
    """Puts the images of requests into their prompts, for one model version. It belongs to one event loop."""

    def __init__(self, directory: Path, image_token_id: int, config: ImageConfig) -> None:
        """Keep the settings. directory: the checkpoint's; image_token_id: the placeholder of an image in a prompt"""
        self.config = config
        self._image_token_id = image_token_id
        self._processors = ImageProcessors(directory, config)
        self._settings = _digest_settings(directory)
        self._results: SizedCache[str, ProcessedImage] = SizedCache(config.cache_mib << 20)
        self._under_way: dict[str, asyncio.Task[ProcessedImage]] = {}

    async def place(self, request: GenerateRequest, token_ids: list[int], cache_salt: str | None) -> PlacedImages:
        """Put a request's images into its prompt: each placeholder is repeated for each of its image's tokens.

        Raises InvalidRequest with every violation, Overloaded if too many images wait.
        """
        sent = images_of(request)
        num_placeholders = token_ids.count(self._image_token_id)
        violations = Violations()
        if num_placeholders != len(sent):
            shown = f"{num_placeholders} image placeholders (token {self._image_token_id}) in the prompt"
            violations.add(
                sent[0].field if sent else "prompt", shown, f"one for each image, of which there are {len(sent)}"
            )
            violations.raise_if_any()
        if not sent:
            return PlacedImages(token_ids)
        images = await self._process_all(sent, cache_salt or "", violations)
        return self._expand(token_ids, images)

    def close(self) -> None:
        """End the processes."""
        self._processors.close()

    async def _process_all(
        self, sent: Sequence[SentImage], salt: str, violations: Violations
    ) -> list[tuple[str, ProcessedImage]]:
        images: list[tuple[str, ProcessedImage]] = []
        for one in sent:
            try:
                data = read_data(one.image)
                name = self._name(data, salt)
                image = await self._process(name, data)
            except (ImageRefused, ValueError) as error:
                violations.add(one.field, "an image", f"an image that can be read: {error}")
                continue
            except ImagesUnavailable as error:
                raise Overloaded(str(error), _RETRY_DELAY_S) from error
            if image.num_tokens > self.config.max_image_tokens:
                shown = f"an image of {image.num_tokens} tokens"
                violations.add(one.field, shown, f"at most {self.config.max_image_tokens} tokens: send a smaller one")
            images.append((name, image))
        # An image that a request contains twice is sent to engines once.
        num_bytes = sum(image.size_bytes for image in dict(images).values())
        if num_bytes > self.config.max_input_mib << 20:
            shown = f"images of {num_bytes >> 20} MiB, as the encoder is given them"
            violations.add(sent[0].field, shown, f"at most {self.config.max_input_mib} MiB: send smaller ones or fewer")
        violations.raise_if_any()
        return images

    def _name(self, data: bytes, salt: str) -> str:
        digest = hashlib.blake2b(self._settings, digest_size=16)
        digest.update(f"{len(salt)}:{salt}".encode())
        digest.update(data)
        return digest.hexdigest()

    async def _process(self, name: str, data: bytes) -> ProcessedImage:
        """Return the result for an image, cached or not. Raises ImageRefused or ImagesUnavailable."""
        if (known := self._results.get(name)) is not None:
            return known
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(self._process_and_keep(name, data))
        try:
            async with asyncio.timeout(self.config.wait_timeout_s):
                # Other requests may wait for the same image, and the client may send it again.
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise ImagesUnavailable("too many images wait for processing") from error
        finally:
            # The task keeps its error, whose traceback refers to this frame. If the frame also referred to the task,
            # the image's bytes would stay in memory until the next collection.
            del task

    async def _process_and_keep(self, name: str, data: bytes) -> ProcessedImage:
        try:
            image = await self._processors.process(data)
            self._results.put(name, image, image.size_bytes)
            return image
        finally:
            del self._under_way[name]

    def _expand(self, token_ids: list[int], images: Sequence[tuple[str, ProcessedImage]]) -> PlacedImages:
        placed: list[int] = []
        features: list[MultiModalFeature] = []
        begin = 0
        for name, image in images:
            at = token_ids.index(self._image_token_id, begin)
            placed += token_ids[begin:at]
            features.append(MultiModalFeature(name, len(placed), image.num_tokens, image.num_tokens, image.grid))
            placed += [self._image_token_id] * image.num_tokens
            begin = at + 1
        placed += token_ids[begin:]
        inputs = {name: EncoderInput(name, image.arrays) for name, image in images}
        return PlacedImages(placed, tuple(features), tuple(inputs.values()))


def _digest_settings(directory: Path) -> bytes:
    """Return a digest of the files that decide what the processor makes of an image."""
    digest = hashlib.blake2b(digest_size=32)
    for name in _PROCESSOR_FILES:
        file = directory / name
        digest.update(f"{name} ".encode() + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest.digest()
