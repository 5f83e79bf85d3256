"""The fuzzer reaches every kind of message, and most of what it makes is a message, so that it is looked at further."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from actors.ranks.rank_codec import RankCodec
from tests.attacks.inside.message_fuzzer import MessageFuzzer
from tests.attacks.inside.test_ranges import MESSAGES

NUM_MESSAGES = 200
MOST_MESSAGES = 10_000
"""The rarest kind is a fetch of a prefix that a step asks a rank for: every few hundred messages."""
RAW = "from an ingress to an engine"
"""Its requests are decoded one by one: they are the messages "a request"."""


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != RAW])
def test_every_kind_of_a_message_is_made_and_most_of_them_are_valid(name: str) -> None:
    type_ = MESSAGES[name]
    codec, fuzzer = RankCodec((type_,)), MessageFuzzer(type_, 1, {})
    wanted, made, num_valid = set(tags_of(inspect.type_info(type_), ())), set[str](), 0
    for _ in range(NUM_MESSAGES):
        message = fuzzer.make()
        made |= set(tags_made(message))
        try:
            codec.decode(b"\0" + msgspec.msgpack.encode(message))
        except (msgspec.MsgspecError, ValueError):
            continue
        num_valid += 1
    assert num_valid > NUM_MESSAGES / 2
    for _ in range(MOST_MESSAGES):
        if made >= wanted:
            break
        made |= set(tags_made(fuzzer.make()))
    assert made >= wanted


def tags_of(info: Any, within: tuple[type, ...]) -> Iterator[str]:
    """The tags of all structs that a message can hold."""
    match info:
        case inspect.Metadata(type=inner):
            yield from tags_of(inner, within)
        case inspect.UnionType(types=inner):
            for one in inner:
                yield from tags_of(one, within)
        case inspect.StructType(cls=cls) | inspect.DataclassType(cls=cls) if cls not in within:
            if isinstance(tag := getattr(info, "tag", None), str):
                yield tag
            for field in info.fields:
                yield from tags_of(field.type, (*within, cls))
        case inspect.TupleType(item_types=items):
            for item in items:
                yield from tags_of(item, within)
        case inspect.DictType(value_type=value):
            yield from tags_of(value, within)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            yield from tags_of(info.item_type, within)


def tags_made(value: Any) -> Iterator[str]:
    """The tags in a message's plain values."""
    if isinstance(value, dict) and isinstance(tag := value.get("type"), str):
        yield tag
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from tags_made(inner)
