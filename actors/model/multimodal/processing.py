"""transformers' own processing of images, for one checkpoint: from pixels to what its encoder takes.

Always the backend that works with Pillow and numpy: the other one, which needs torchvision, rounds differently, and all
that is made of an image must be the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor

from actors.core.requests.multimodal import PackedArray, ProcessedImage
from actors.model.multimodal.families import image_token_id, vision_family


class ImageProcessing:
    """Processes images for one checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, ValueError or ImportError if the checkpoint has no processor, or none for images."""
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        family = vision_family(config)
        if family is None:
            raise ValueError(f"{directory} is no checkpoint of a model that takes images")
        self._images = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # transformers leaves it so
            directory, local_files_only=True, backend="pil"
        )
        self._has_grids = family.has_grid_positions
        self._image_token_id = image_token_id(config)
        # For a family with grids, AutoProcessor would need torchvision (for videos). It is not needed: the number of an
        # image's tokens follows from its grid.
        self._processor = None
        if not self._has_grids:
            self._processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # left so as well
                directory, local_files_only=True
            )

    def process(self, image: Image.Image) -> ProcessedImage:
        """Process one image. Raises ValueError if its shape is beyond what the processor takes."""
        features = self._images(images=[image], return_tensors="np")
        arrays = {name: _pack(np.asarray(array)) for name, array in features.items()}
        if self._has_grids:
            frames, rows, columns = (int(size) for size in features["image_grid_thw"][0])
            merged = self._images.merge_size
            grid = (frames, rows // merged, columns // merged)
            return ProcessedImage(arrays, frames * grid[1] * grid[2], grid)
        return ProcessedImage(arrays, self._count_placeholders(image))

    def _count_placeholders(self, image: Image.Image) -> int:
        """Return how many placeholder tokens the processor writes into a prompt for this image."""
        assert self._processor is not None
        inputs = self._processor(text=self._processor.image_token, images=[image])
        return int((np.asarray(inputs["input_ids"]) == self._image_token_id).sum())


def _pack(array: np.ndarray) -> PackedArray:
    return PackedArray(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())
