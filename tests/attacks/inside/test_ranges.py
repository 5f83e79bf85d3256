"""Every field of every message between the processes of a cluster has a range, so none can be of any size or value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from actors.core.requests.multimodal import EncoderInput, ProcessedImage
from actors.core.requests.request import EngineCoreRequest
from actors.model.tensor_parallel.mesh import RankAddress, RankAddresses
from actors.ranks.rank_messages import CODEC
from actors.sessions.remote_encoding import EncodedImage
from actors.sessions.session_messages import EngineMessage, ReceivedMessage
from kv_transfer.handoff.control_messages import ControlMessage
from kv_transfer.trust import handshake

MESSAGES: Final[dict[str, Any]] = {
    "from an ingress to an engine": ReceivedMessage,
    "a request": EngineCoreRequest,
    "from an engine to an ingress": EngineMessage,
    "from an engine to an encode engine": EncoderInput,
    "from an encode engine": EncodedImage,
    "between engines, about KV": ControlMessage,
    "the first message of every connection": handshake._Challenge,
    "the answer to it": handshake._Answer,
    "the proof": handshake._Proof,
    "from a rank to the first, on CPUs": RankAddress,
    "from the first rank to the others": RankAddresses,
    "from the process that opens images": ProcessedImage,
    **{f"between ranks, {type_.__name__}": type_ for type_ in CODEC.types},
}


class Inner(msgspec.Struct):
    """Without ranges."""

    text: str
    many: dict[int, list[bytes]]


class Outer(msgspec.Struct):
    """Without ranges."""

    inner: tuple[Inner, ...]
    flag: bool
    number: float | None = None


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_of_a_message_has_a_range(name: str) -> None:
    assert list(boundless(MESSAGES[name])) == []


def test_a_field_without_a_range_would_be_found() -> None:
    assert list(boundless(Outer)) == [
        "inner: tuple of any length",
        "inner[].text: str of any length",
        "inner[].many: dict of any length",
        "inner[].many.keys: int without least or most",
        "inner[].many.values: list of any length",
        "inner[].many.values[]: bytes of any length",
        "number: float without least or most",
    ]


def boundless(type_: Any) -> Iterator[str]:
    """Every place in a message where a value may be of any size, as field names and what is there."""
    yield from _boundless(inspect.type_info(type_), "", ())


def _boundless(info: Any, place: str, within: tuple[type, ...]) -> Iterator[str]:  # noqa: C901  # a branch for each kind of type
    match info:
        case inspect.Metadata(type=inspect.FloatType(), extra={"any": True}):
            return
        case inspect.Metadata(type=inner):
            yield from _boundless(inner, place, within)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _boundless(one, place, within)
        case inspect.StructType(cls=cls) | inspect.DataclassType(cls=cls):
            if cls not in within:
                for field in info.fields:
                    inner_place = f"{place}.{field.name}" if place else field.name
                    yield from _boundless(field.type, inner_place, (*within, cls))
        case inspect.NoneType() | inspect.BoolType() | inspect.EnumType() | inspect.LiteralType() | inspect.RawType():
            return  # A Raw is decoded as something of its own, which is in MESSAGES.
        case inspect.IntType(ge=least, gt=above, le=most, lt=below):
            # MessagePack has no integer of more than 64 bits: with a least of 0 or more, that is a range.
            if (least is None and above is None) or (most is None and below is None and (least or above or 0) < 0):
                yield f"{place}: int without least or most"
        case inspect.FloatType(ge=least, gt=above, le=most, lt=below):
            if (least is None and above is None) or (most is None and below is None):
                yield f"{place}: float without least or most"
        case inspect.CustomType(cls=cls) if cls is np.ndarray:
            return  # tests/actors/ranks/test_rank_codec.py
        case inspect.StrType() | inspect.BytesType():
            if info.max_length is None:
                yield f"{place}: {type(info).__name__.removesuffix('Type').lower()} of any length"
        case inspect.TupleType(item_types=items):
            for item in items:
                yield from _boundless(item, f"{place}[]", within)
        case inspect.DictType(key_type=key, value_type=value):
            if info.max_length is None:
                yield f"{place}: dict of any length"
            yield from _boundless(key, f"{place}.keys", within)
            yield from _boundless(value, f"{place}.values", within)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            if info.max_length is None:
                kind = type(info).__name__.removesuffix("Type").removeprefix("Var").lower()
                yield f"{place}: {kind} of any length"
            yield from _boundless(info.item_type, f"{place}[]", within)
        case _:
            yield f"{place}: {info} is not known here"
