"""Messages made from msgspec's own description of a type: valid ones, and the same with something wrong in one place.

What is made are the plain values that MessagePack carries, so that nothing here checks them before the receiver does.
"""

from __future__ import annotations

import copy
import enum
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import inspect

_HOSTILE: Final[tuple[Any, ...]] = (
    -1,
    0,
    -(2**63),
    2**31,
    2**40,
    2**63 - 1,
    2**64 - 1,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    None,
    True,
    "",
    "\0",
    "x" * 100_000,
    b"",
    b"\xff" * 4096,
    [],
    {},
    [[]] * 1000,
    {"type": "ready"},
)


class MessageFuzzer:
    """Makes messages of one type. The same seed makes the same ones."""

    def __init__(self, type_: Any, seed: int, known: Mapping[str, Callable[[random.Random], Any]]) -> None:
        """known: by the name of a field, what makes values for it that mean something to the receiver."""
        self._info = inspect.type_info(type_)
        self._random = random.Random(seed)
        self._known = known

    def make(self) -> Any:
        """A valid message, as plain values."""
        return self._make(self._info)

    def make_hostile(self) -> bytes:
        """A message with something wrong in it, or several things, or its bytes cut, changed or lengthened."""
        message = self.make()
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 5))):
            message = self._spoiled(message)
        frame = bytearray(msgspec.msgpack.encode(message))
        match self._random.randrange(12):
            case 0:
                del frame[self._random.randrange(len(frame)) :]
            case 1:
                frame[self._random.randrange(len(frame))] = self._random.randrange(256)
            case 2:
                frame += self._random.randbytes(self._random.randrange(1, 64))
            case 3:
                frame = bytearray(self._random.randbytes(self._random.randrange(256)))
        return bytes(frame)

    def _spoiled(self, message: Any) -> Any:
        """The message with one value, anywhere in it, replaced or left out."""
        message = copy.deepcopy(message)
        entries: list[tuple[Any, Any]] = []
        _find_entries(message, entries)
        if not entries:
            return self._random.choice(_HOSTILE)
        container, key = self._random.choice(entries)
        if isinstance(container, dict) and self._random.random() < 0.15:
            del container[key]
        elif isinstance(container, list) and self._random.random() < 0.2:
            container += [copy.deepcopy(container[key])] * self._random.choice((1, 100))
        else:
            container[key] = copy.deepcopy(self._random.choice(_HOSTILE))
        return message

    def _make(self, info: Any) -> Any:  # noqa: C901  # as many branches as there are kinds of types
        draw = self._random
        match info:
            case inspect.Metadata(type=inner):
                return self._make(inner)
            case inspect.UnionType(types=types):
                return self._make(draw.choice(types))
            case inspect.StructType(array_like=True):
                return [self._value_of(field) for field in info.fields]
            case inspect.StructType() | inspect.DataclassType():
                return self._make_fields(info)
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return draw.random() < 0.5
            case inspect.IntType():
                least, most = _limits_of(info)
                return draw.choice((least, most, min(most, max(least, draw.randrange(64)))))
            case inspect.FloatType():
                return draw.choice((0.5, 1.0, 0.0 if info.gt is None else 1e-3))
            case inspect.StrType():
                return "a" * max(info.min_length or 0, draw.randrange(3))
            case inspect.BytesType():
                return draw.randbytes(max(info.min_length or 0, draw.choice((0, 16))))
            case inspect.EnumType(cls=cls):
                return draw.choice([member.value for member in cls])
            case inspect.LiteralType(values=values):
                return draw.choice(values)
            case inspect.CustomType(cls=cls) if cls is np.ndarray:
                return ["<i8", [2, 1], draw.randbytes(16)]
            case inspect.TupleType(item_types=items):
                return [self._make(item) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                return {self._make(key): self._make(value) for _ in range(draw.randrange(3))}
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
                return [self._make(info.item_type) for _ in range(max(info.min_length or 0, draw.randrange(3)))]
        raise TypeError(f"no values are made of {info}")

    def _make_fields(self, info: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if getattr(info, "tag_field", None) is not None:
            values[info.tag_field] = info.tag
        for field in info.fields:
            if field.encode_name in self._known or field.required or self._random.random() < 0.3:
                values[field.encode_name] = self._value_of(field)
        return values

    def _value_of(self, field: Any) -> Any:
        known = self._known.get(field.encode_name)
        value = self._make(field.type) if known is None else known(self._random)
        return value.value if isinstance(value, enum.Enum) else value


def _limits_of(info: inspect.IntType) -> tuple[int, int]:
    least = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -(2**62)
    most = info.le if info.le is not None else info.lt - 1 if info.lt is not None else 2**62
    return least, most


def _find_entries(value: Any, entries: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        entries.append((value, key))
        _find_entries(inner, entries)
