"""The ranges of fields in messages between processes.

When msgspec decodes a message, it refuses a value outside of the field's range. A limit that is known only at run time
(the vocabulary, the blocks that were asked for) is checked where the message is used.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, MsgspecError

MALFORMED: Final = (MsgspecError, ValueError, RecursionError)
"""The errors that a decoder raises for bytes that are no message. Text that is not UTF-8 raises ValueError."""
MAX_COUNT: Final = 2**31 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
SizeBytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Incarnation: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Digest64: TypeAlias = Annotated[int, Meta(ge=0)]
"""An unsigned integer of 64 bits. MessagePack has none that is longer, so no upper bound is needed."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A token's id. The engine, which knows the vocabulary's size, checks that the id is below it."""

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"\A[^\x00]*\Z")]
"""An id that comes from outside the cluster."""
WireName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
"""An id that an engine may have lengthened."""
Word: TypeAlias = Annotated[str, Meta(max_length=256)]
Sentence: TypeAlias = Annotated[str, Meta(max_length=65_536)]
Address: TypeAlias = Annotated[str, Meta(max_length=512, pattern=r"\A[^\s\x00]*\Z")]
"""host:port; empty for an engine that no process dials."""
ShortBytes: TypeAlias = Annotated[bytes, Meta(max_length=1024)]
"""A hash, or another short name in bytes."""
Clock: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds on a clock whose zero is not known: finite, and positive or negative."""
MAX_ITEMS: Final = 2**26
"""The most bytes of a message between processes (64 MiB), so the most entries of a container in a message."""
MAX_KINDS: Final = 65_536
"""The most entries of what an engine has few of: links, kinds of something that is counted."""
Total: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
"""A counter that runs for as long as its process."""
Bulk: TypeAlias = Annotated[bytes, Meta(max_length=MAX_ITEMS)]
"""An array's bytes. The receiver compares their number with the array's shape."""
LongText: TypeAlias = Annotated[str, Meta(max_length=2**24)]
"""An error's text, which may quote what the error is about."""
AnyFloat: TypeAlias = Annotated[float, Meta(extra={"any": True})]
"""A number that a model has computed: infinite or NaN if the model is broken. It is handed on without any use."""
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_ITEMS)]
BlockIds: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
RequestIds: TypeAlias = Annotated[set[WireName], Meta(max_length=MAX_ITEMS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
