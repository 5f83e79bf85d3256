"""Names of transfers and of their parts, as two engines send them to each other.

Tests of kv_transfer/handoff/control_messages.py.
"""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.handoff.control_messages import (
    Cancel,
    Chunk,
    ChunkSum,
    ControlMessage,
    Finished,
    Ready,
    decode,
    encode,
)
from kv_transfer.message_ranges import MALFORMED, MAX_COUNT
from kv_transfer.params import TransferPart

PART = TransferPart("t", 1, 0)


@pytest.mark.parametrize("transfer_id", ["t", PART], ids=["whole", "part"])
def test_every_message_about_a_transfer_carries_its_id_unchanged(transfer_id: str | TransferPart) -> None:
    messages: list[ControlMessage] = [
        Ready(transfer_id, 0, 0, 1),
        Chunk(transfer_id, 0, 0, 1),
        ChunkSum(transfer_id, 0, 0, 1),
        Finished(transfer_id, 0, ProducerEnd.HANDED_OVER, 1, 7, ""),
        Cancel(transfer_id, 0),
    ]
    assert [decode(encode(message)) for message in messages] == messages


@pytest.mark.parametrize(
    "transfer_id",
    [["t"], ["t", 1], ["t", 1, -1], ["t", MAX_COUNT + 1, 0], ["", 1, 0], [7, 1, 0], ["t", "1", "0"], 7, None],
    ids=repr,
)
def test_an_id_without_its_ranks_or_out_of_range_is_malformed(transfer_id: object) -> None:
    with pytest.raises(MALFORMED):
        decode(msgspec.msgpack.encode({"type": "cancel", "transfer_id": transfer_id, "attempt": 0}))
    assert decode(msgspec.msgpack.encode({"type": "cancel", "transfer_id": ["t", 1, 0], "attempt": 0})) == Cancel(
        PART, 0
    )


def test_no_name_of_a_transfer_is_the_id_of_a_part() -> None:
    names = ["t", "t#1-0", str(PART), "('t', 1, 0)"]
    assert len({PART, TransferPart("t", 0, 1), TransferPart("t#1-0", 1, 0), *names}) == len(names) + 3
    assert str(PART) == "t (rank 1 to rank 0)"
