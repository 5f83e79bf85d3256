"""How chunks are cut into messages and groups: alike at both ends, wherever the blocks lie."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.transports.nccl_messages import cut_groups, cut_messages, place


def cache(num_blocks: int, size_bytes: int) -> Tensor:
    return torch.arange(num_blocks * size_bytes).to(torch.uint8).view(num_blocks, size_bytes)


def never() -> Tensor:
    raise AssertionError("nothing is scattered")


def test_consecutive_small_blocks_are_one_message_in_place() -> None:
    pool = cache(8, 16)
    (message,) = cut_messages(pool[2:6].unbind(), 64)
    placement = place([message], never)
    assert placement.runs == ((pool[2].data_ptr(), 64),)
    assert placement.staged == placement.pieces == ()


def test_scattered_small_blocks_share_a_message_through_the_staging_buffer() -> None:
    pool, staging = cache(8, 16), torch.zeros(64, dtype=torch.uint8)
    messages = cut_messages([pool[5], pool[1], pool[3], pool[4]], 32)
    placement = place(messages, lambda: staging)
    assert placement.runs == ((staging.data_ptr(), 32), (pool[3].data_ptr(), 32))
    assert [part.data_ptr() for part in placement.staged] == [staging.data_ptr(), staging.data_ptr() + 16]
    assert [piece.data_ptr() for piece in placement.pieces] == [pool[5].data_ptr(), pool[1].data_ptr()]


def test_large_blocks_are_messages_of_their_own_in_place() -> None:
    pool = cache(4, 100)
    placement = place(cut_messages([pool[3], pool[0]], 64), never)
    assert placement.runs == ((pool[3].data_ptr(), 100), (pool[0].data_ptr(), 100))


def test_blocks_of_any_dtype_and_shape_travel_as_bytes() -> None:
    pool = torch.zeros(3, 2, 5, dtype=torch.bfloat16)
    (message,) = cut_messages(pool.unbind(), 1000)
    assert message.size_bytes == 60
    assert all(piece.dtype == torch.uint8 for piece in message.pieces)


def test_a_group_stages_no_more_than_the_buffer_holds() -> None:
    pool = cache(12, 16)
    messages = cut_messages(pool.unbind(), 32)
    groups = list(cut_groups(messages, 64))
    assert [len(group) for group in groups] == [2, 2, 2]
    assert [message for group in groups for message in group] == messages


def test_large_blocks_are_one_group_however_many() -> None:
    messages = cut_messages(cache(50, 100).unbind(), 64)
    assert list(cut_groups(messages, 64)) == [messages]


sizes_and_orders = st.lists(st.integers(1, 40), min_size=1, max_size=12).flatmap(
    lambda sizes: st.tuples(
        st.just(sizes), st.permutations(range(len(sizes))), st.permutations(range(len(sizes))), st.integers(1, 64)
    )
)


@given(sizes_and_orders)
def test_both_ends_cut_alike_and_every_byte_finds_its_place(
    case: tuple[list[int], list[int], list[int], int],
) -> None:
    sizes, source_order, target_order, message_size_bytes = case
    sources, targets = scattered(sizes, source_order), scattered(sizes, target_order)
    for index, source in enumerate(sources):
        source.fill_(index + 1)
    ends = [cut_messages(blocks, message_size_bytes) for blocks in (sources, targets)]
    groups = [[[m.size_bytes for m in group] for group in cut_groups(end, 64)] for end in ends]
    assert groups[0] == groups[1]
    for sent, received in zip(*ends, strict=True):
        for source, target in zip(sent.pieces, received.pieces, strict=True):
            target.copy_(source)
        placement = place([sent], lambda: torch.zeros(64, dtype=torch.uint8))
        assert placement.runs[0][1] == sum(piece.numel() for piece in sent.pieces)
        assert bool(placement.staged) == (not sent.is_consecutive)
    for index, target in enumerate(targets):
        assert target.eq(index + 1).all()


def scattered(sizes: list[int], order: list[int]) -> list[Tensor]:
    """Blocks of these sizes, in one pool, one after the other in the given order."""
    pool = torch.zeros(sum(sizes), dtype=torch.uint8)
    parts: dict[int, Tensor] = {}
    offset = 0
    for index in order:
        parts[index] = pool[offset : offset + sizes[index]]
        offset += sizes[index]
    return [parts[index] for index in range(len(sizes))]
