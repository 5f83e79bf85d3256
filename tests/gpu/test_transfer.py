"""Two processes hand paged KV over through the real agent and NCCL, bit for bit."""

from __future__ import annotations

import pytest

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.layout import KVCacheLayout
from tests.gpu.conftest import Site, Spawn
from tests.gpu.transfer_peer import TransferPeer
from tests.trusted import material

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SOURCE = (40, 41, 42, 3, 17, 16, 15, 63, 0, 1, 2, 8)
TARGET = (5, 20, 21, 22, 23, 9, 8, 7, 60, 61, 2, 33)
NUM_TOKENS = 12 * 16 - 3


def make_layout(head_dim: int, dtype: str = "bfloat16") -> KVCacheLayout:
    """Blocks of head_dim KiB."""
    return KVCacheLayout(
        num_blocks=64,
        num_kv_heads=4,
        num_layers=4,
        block_size=16,
        head_dim=head_dim,
        dtype=dtype,
        dtype_size_bytes=2,
        model_fingerprint="random",
    )


@pytest.mark.parametrize("block_kib", [32, 512, 2048])
def test_scattered_blocks_arrive_bit_for_bit_and_nothing_else_is_written(
    sites: list[Site], spawn: Spawn, block_kib: int
) -> None:
    layout = make_layout(block_kib)
    prefill = spawn(sites[0], TransferPeer, "prefill-0", layout, KVTransferConfig(), material())
    decode = spawn(sites[1], TransferPeer, "decode-0", layout, KVTransferConfig(), material())
    untouched = decode.call("digests")
    prefill.call("produce", "a", decode.call("address"), NUM_TOKENS)
    decode.call("reserve", "a", prefill.call("address"), TARGET, NUM_TOKENS)
    prefill.call("wait_ready", "a")
    for step, num_tokens in enumerate(((0, 64), (64, 150), (150, NUM_TOKENS))):
        prefill.call("compute", "a", SOURCE, num_tokens, step)
    prefill.call("finish", "a", ProducerEnd.HANDED_OVER)
    assert decode.call("wait_received", "a").outcome is LoadOutcome.LOADED
    prefill.call("wait_finished_sending", "a")
    sent, received = prefill.call("digests"), decode.call("digests")
    assert [received[block] for block in TARGET] == [sent[block] for block in SOURCE]
    others = set(range(layout.num_blocks)) - set(TARGET)
    assert all(received[block] == untouched[block] for block in others)


def test_a_chunk_leaves_after_its_step_though_the_host_is_ahead_of_the_device(sites: list[Site], spawn: Spawn) -> None:
    """The device sleeps before it writes the blocks: without the step's event, the old content would leave."""
    layout = make_layout(512)
    prefill = spawn(sites[0], TransferPeer, "prefill-0", layout, KVTransferConfig(), material())
    decode = spawn(sites[1], TransferPeer, "decode-0", layout, KVTransferConfig(), material())
    prefill.call("produce", "a", decode.call("address"), NUM_TOKENS)
    decode.call("reserve", "a", prefill.call("address"), TARGET, NUM_TOKENS)
    prefill.call("wait_ready", "a")
    prefill.call("compute", "a", SOURCE, (0, NUM_TOKENS), 1, 0.5)
    prefill.call("finish", "a", ProducerEnd.HANDED_OVER)
    assert decode.call("wait_received", "a").outcome is LoadOutcome.LOADED
    sent, received = prefill.call("digests"), decode.call("digests")
    assert [received[block] for block in TARGET] == [sent[block] for block in SOURCE]
