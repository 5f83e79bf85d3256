"""Encodes the messages between the ranks of an engine: one byte for the type, then MessagePack.

Decoding checks every field's type and range, as for all internal messages (kv_transfer/message_ranges.py). An array is
encoded as its dtype, its shape and its bytes; the decoded array owns its memory and may be written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from kv_transfer.message_ranges import MAX_COUNT

_DTYPES: Final = {np.dtype(name).str: np.dtype(name) for name in ("bool", "int32", "int64", "uint32", "float32")}
_MAX_DIMENSIONS: Final = 4


class RankCodec:
    """Encodes and decodes messages of the given types; both ends have the same types in the same order."""

    def __init__(self, types: Sequence[type]) -> None:
        self.types: Final = tuple(types)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoders: list[msgspec.msgpack.Decoder[object]] = [
            msgspec.msgpack.Decoder(type_, dec_hook=_array) for type_ in types
        ]
        self._kinds = {type_: bytes((number,)) for number, type_ in enumerate(types)}

    def encode(self, message: object) -> bytes:
        """Return the message's bytes."""
        return self._kinds[type(message)] + self._encoder.encode(message)

    def decode(self, frame: bytes | bytearray | memoryview) -> object:
        """Return the message. Raises one of kv_transfer.message_ranges.MALFORMED."""
        if not frame or frame[0] >= len(self._decoders):
            raise ValueError(f"a message of {len(frame)} bytes has no known type")
        return self._decoders[frame[0]].decode(memoryview(frame)[1:])


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent between ranks")
    return value.dtype.str, value.shape, value.tobytes()


def _array(type_: type, value: Any) -> np.ndarray:
    if type_ is not np.ndarray or not isinstance(value, list) or len(value) != 3:
        raise ValueError("an array is not a list of dtype, shape and bytes")
    dtype_name, shape, data = value
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    is_shape = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(map(_is_size, shape))
    if dtype is None or not is_shape or not isinstance(data, bytes):
        raise ValueError("an array has a dtype, a shape or data that messages between ranks cannot have")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {dtype} and shape {shape} cannot have {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT
