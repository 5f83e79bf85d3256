"""The process that works on images: `python -m cluster.images.processor_child FD MEMORY_BYTES`.

A decoder of images is given what strangers send. A few kilobytes can unfold into gigabytes, and decoders have had
holes; so it lives in a process of its own (bounded_child.py). The greeting is a ChildGreeting in JSON; a task is an
image's bytes, answered by PROCESSED and a ProcessedImage in msgpack, or by REFUSED and why not.
"""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from PIL import Image, ImageOps, UnidentifiedImageError

from actors.model.multimodal.processing import ImageProcessing
from actors.process.bounded_child import work
from cluster.images.errors import ImageRefused
from cluster.images.processor_process import PROCESSED, REFUSED, ChildGreeting

_MAX_REASON_CHARS: Final = 500
_DECODER_ERRORS: Final = (
    ArithmeticError,
    Image.DecompressionBombError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""The errors of Pillow's decoders for broken files, and of transformers for shapes that it does not take."""


def main() -> None:
    """Work on images until the other end hangs up."""
    descriptor, memory_bytes = (int(argument) for argument in sys.argv[1:])

    def start(message: bytes) -> Callable[[bytes], bytes]:
        greeting = msgspec.json.decode(message, type=ChildGreeting)
        processing = ImageProcessing(Path(greeting.directory))
        # What Pillow calls a bomb is bounded here, before anything is decoded.
        Image.MAX_IMAGE_PIXELS = None
        # The first image pays for what is loaded late, and for memory that threads reserve.
        processing.process(Image.new("RGB", (64, 64)))
        return lambda data: answer(processing, data, greeting)

    work(descriptor, memory_bytes, start)


def answer(processing: ImageProcessing, data: bytes, greeting: ChildGreeting) -> bytes:
    """Work on one image, and say what came of it."""
    try:
        image = open_image(data, greeting)
        return PROCESSED + msgspec.msgpack.encode(processing.process(image))
    except ImageRefused as error:
        reason = str(error)
    except MemoryError:
        reason = "it takes too much memory"
    except _DECODER_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    return REFUSED + reason[:_MAX_REASON_CHARS].encode(errors="replace")


def open_image(data: bytes, limits: ChildGreeting) -> Image.Image:
    """Decode an image the way transformers' load_image does: upright, in RGB. Raises ImageRefused."""
    try:
        image = Image.open(io.BytesIO(data), formats=limits.formats)
    except UnidentifiedImageError as error:
        raise ImageRefused(f"it is no image in a format that is read here ({', '.join(limits.formats)})") from error
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageRefused(f"it has {width} x {height} pixels, and at most {limits.max_pixels} are allowed")
    if getattr(image, "n_frames", 1) > 1:
        raise ImageRefused(f"it has {getattr(image, 'n_frames', 1)} frames, and animations are not taken")
    return ImageOps.exif_transpose(image).convert("RGB")


if __name__ == "__main__":
    main()
