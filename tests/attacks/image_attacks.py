"""Images that are small as they are sent and large, or slow, once they are decoded."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import struct
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from PIL import Image

from cluster.api.protos.raypd.v1 import generate_pb2
from tests.attacks.grpc_attacks import GENERATE, call
from tests.attacks.http_attacks import post
from tests.attacks.target import Attack, Target
from tests.vision import image_marker

FAMILY: Final = "qwen2_5_vl"
"""The family of the model that takes these images."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MIB: Final = 2**20


def _png(*pieces: tuple[bytes, bytes]) -> bytes:
    """Write a file of these chunks."""
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in pieces
    )
    return _PNG + b"".join(chunks)


def _head(width: int, height: int, bits: int = 8, color: int = 2) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)


def black_png(width: int, height: int) -> bytes:
    """Write an image of one color: a thousandth of what it is decoded to."""
    deflate = zlib.compressobj(9)
    rows = b"\0" * (1 + 3 * width)
    data = b"".join(deflate.compress(rows) for _ in range(height)) + deflate.flush()
    return _png(_head(width, height), (b"IDAT", data), (b"IEND", b""))


def _png_of_texts() -> bytes:
    """Text chunks, each of which is unpacked to 60 MiB."""
    text = b"comment\0\0" + zlib.compress(b"x" * (60 * _MIB), 9)
    return _png(_head(8, 8), *[(b"zTXt", text)] * 60, (b"IEND", b""))


def _png_of_chunks() -> bytes:
    return _png(_head(8, 8), *[(b"tEXt", b"a\0b")] * 200_000, (b"IEND", b""))


def _large_jpeg() -> bytes:
    data = _saved("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", 65_500, 65_500) + data[at + 4 :]


def _large_webp() -> bytes:
    """Make a small file whose header claims 16 384 x 16 384 pixels."""
    data = bytearray(_saved("WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    data[at : at + 4] = struct.pack("<I", 0x3FFF | 0x3FFF << 14)
    return bytes(data)


def _saved(kind: str, num_frames: int = 1, **options: Any) -> bytes:
    """Write an image, or an animation, as Pillow does."""
    frames = [Image.new("RGB", (40, 24), (number % 256, number // 256, 0)) for number in range(num_frames)]
    buffer = io.BytesIO()
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]} if num_frames > 1 else {}
    frames[0].save(buffer, kind, **more, **options)
    return buffer.getvalue()


_IMAGES: Final[dict[str, Callable[[], bytes]]] = {
    "a PNG of 900 million pixels": lambda: _png(_head(30_000, 30_000), (b"IDAT", b""), (b"IEND", b"")),
    "a PNG of 2^62 pixels": lambda: _png(_head(2**31 - 1, 2**31 - 1, 1, 0), (b"IDAT", b"x"), (b"IEND", b"")),
    "a PNG of as many pixels as may be": lambda: black_png(5792, 5792),
    "a PNG with 3.5 GiB of text": _png_of_texts,
    "a PNG of 200 000 chunks": _png_of_chunks,
    "a JPEG of 4 billion pixels": _large_jpeg,
    "a JPEG that ends early": lambda: _saved("JPEG")[:400],
    "a GIF of 2000 frames": lambda: _saved("GIF", 2000),
    "a WebP of 1000 frames": lambda: _saved("WEBP", 1000),
    "a WebP of 268 million pixels": _large_webp,
    "8 MiB of zeros": lambda: b"\0" * (8 * _MIB),
}


def _by_grpc(make: Callable[[], bytes]) -> Callable[[Target], Awaitable[None]]:
    async def send(target: Target) -> None:
        request = generate_pb2.GenerateRequest(
            text=image_marker(FAMILY),
            images=[generate_pb2.Image(data=make())],
            sampling_params=generate_pb2.SamplingParams(max_tokens=1),
        )
        codes = await asyncio.gather(*(call(target, GENERATE, request) for _ in range(4)))
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, codes

    return send


def _by_http(make: Callable[[], bytes]) -> Callable[[Target], Awaitable[None]]:
    async def send(target: Target) -> None:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(make()).decode()}}
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
        data = json.dumps(body).encode()
        statuses = await asyncio.gather(*(post(target, "/v1/chat/completions", data) for _ in range(4)))
        assert set(statuses) <= {200, 400}, statuses

    return send


ATTACKS: Final = [
    Attack(f"{api}{name}", send(functools.cache(make)))
    for name, make in _IMAGES.items()
    for api, send in (("", _by_grpc), ("http: ", _by_http))
]
