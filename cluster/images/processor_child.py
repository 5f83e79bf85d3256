"""The process that prepares images for the model: `python -m cluster.images.processor_child FD MEMORY_BYTES`.

Strangers send the images. A few kilobytes can expand to gigabytes, and decoders have had vulnerabilities; so images are
decoded in a process of their own (bounded_child.py). The greeting is a ChildGreeting in JSON. A task is an image's
bytes; the answer is PROCESSED and a ProcessedImage in msgpack, or REFUSED and the reason.
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
"""The errors that Pillow's decoders raise for broken files, and transformers for shapes that it does not take."""


def main() -> None:
    """Process images until the ingress closes the connection."""
    descriptor, memory_bytes = (int(argument) for argument in sys.argv[1:])

    def start(message: bytes) -> Callable[[bytes], bytes]:
        greeting = msgspec.json.decode(message, type=ChildGreeting)
        processing = ImageProcessing(Path(greeting.directory))
        # Pillow's own limit is switched off: open_image() limits the pixels before it decodes anything.
        Image.MAX_IMAGE_PIXELS = None
        # The first image makes libraries load modules and reserve memory for threads, so process a small image now.
        processing.process(Image.new("RGB", (64, 64)))
        return lambda data: answer(processing, data, greeting)

    work(descriptor, memory_bytes, start)


def answer(processing: ImageProcessing, data: bytes, greeting: ChildGreeting) -> bytes:
    """Process one image; returns the answer to the ingress."""
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
    """Decode an image as transformers' load_image does: upright, in RGB. Raises ImageRefused."""
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
