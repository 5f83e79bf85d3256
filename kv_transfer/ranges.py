"""The ranges of fields in messages between engines.

msgspec refuses a message with a value outside of its field's range when it decodes the message. What a range cannot
know (the vocabulary, the blocks that were asked for) is checked where the message is used.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, MsgspecError

MALFORMED: Final = (MsgspecError, ValueError, RecursionError)
"""What a decoder raises for bytes that are no message. Text that is not UTF-8 is a ValueError."""
MAX_COUNT: Final = 2**31 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
SizeBytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Incarnation: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Digest64: TypeAlias = Annotated[int, Meta(ge=0)]
"""MessagePack has no integer of more than 64 bits."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Below the vocabulary's size is checked by the engine, which knows it."""

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"\A[^\x00]*\Z")]
"""An id that comes from outside."""
WireName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
"""An id that an engine may have lengthened."""
Word: TypeAlias = Annotated[str, Meta(max_length=256)]
Sentence: TypeAlias = Annotated[str, Meta(max_length=65_536)]
Address: TypeAlias = Annotated[str, Meta(max_length=512, pattern=r"\A[^\s\x00]*\Z")]
"""host:port; empty where nobody dials."""
ShortBytes: TypeAlias = Annotated[bytes, Meta(max_length=1024)]
"""A hash, or another name in bytes."""
Clock: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds on some clock: finite, and no zero is known."""
MAX_ITEMS: Final = 2**26
"""No message between processes has more bytes (64 MiB), so no container in one has more entries."""
MAX_KINDS: Final = 65_536
"""Kinds of something that is counted, links, and other things that an engine has few of."""
Total: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
"""A counter that runs for as long as its process."""
Bulk: TypeAlias = Annotated[bytes, Meta(max_length=MAX_ITEMS)]
"""An array's bytes. Whoever takes them compares them with the array's shape."""
LongText: TypeAlias = Annotated[str, Meta(max_length=2**24)]
"""An error's text may quote what it is about."""
AnyFloat: TypeAlias = Annotated[float, Meta(extra={"any": True})]
"""What a model has computed: infinite, or no number, if the model is broken. It is handed on, nothing else."""
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_ITEMS)]
BlockIds: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
RequestIds: TypeAlias = Annotated[set[WireName], Meta(max_length=MAX_ITEMS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
