"""One rule decides who may hand over to whom, for routers and for handshakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Hello
from kv_transfer.layout import KeyOrder, KVCacheLayout, KVGroup
from kv_transfer.links.link_compatibility import PairingFacts, find_mismatch
from kv_transfer.links.peer_link import find_disagreement
from tests.kv_transfer.connected_workers import LAYOUT

FACTS = PairingFacts.of_rank(LAYOUT, "tcp", checksum=False, is_on_gpu=False)
TRANSPOSED = replace(FACTS, key_order=KeyOrder.TRANSPOSED)
GROUP = KVGroup(num_layers=2, num_kv_heads=1, key_size=576, value_size=0, dtype="float32")
ON_GPU = replace(FACTS, transport="nccl", is_on_gpu=True)


def mismatch(one: PairingFacts, other: PairingFacts) -> str | None:
    return find_mismatch(one, other, "prefill-0", "decode-1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FACTS, FACTS),
        (FACTS, replace(FACTS, block_size=8)),
        (FACTS, replace(FACTS, block_size=1)),
        (ON_GPU, ON_GPU),
        (TRANSPOSED, TRANSPOSED),
    ],
)
def test_like_engines_are_a_pair_and_on_cpus_block_sizes_may_be_multiples(
    one: PairingFacts, other: PairingFacts
) -> None:
    assert mismatch(one, other) is None
    assert mismatch(other, one) is None


def test_numbers_of_blocks_and_of_ranks_are_each_engines_own_affair() -> None:
    half = replace(LAYOUT, num_blocks=7, num_kv_heads=1, tp_size=2, tp_rank=1)
    replicas = replace(LAYOUT, num_kv_heads=1, tp_size=4, num_replicas=2)
    for layout in (half, replicas):
        assert PairingFacts.of_rank(layout, "tcp", checksum=False, is_on_gpu=False) == FACTS


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (FACTS, replace(FACTS, protocol_version=99), f"protocol version: {PROTOCOL_VERSION} at prefill-0, 99 {{}}"),
        (FACTS, replace(FACTS, transport="loopback"), "transport: 'tcp' at prefill-0, 'loopback' {}"),
        (FACTS, replace(FACTS, checksum=True), "checksum: False at prefill-0, True {}"),
        (FACTS, replace(FACTS, model_fingerprint="b"), "model: 'model-a' at prefill-0, 'b' {}"),
        (FACTS, replace(FACTS, dtype="bfloat16"), "dtype: 'float32' at prefill-0, 'bfloat16' {}"),
        (FACTS, replace(FACTS, num_kv_heads=4), "num_kv_heads of all ranks: 2 at prefill-0, 4 {}"),
        (FACTS, replace(FACTS, num_layers=3), "num_layers: 2 at prefill-0, 3 {}"),
        (FACTS, replace(FACTS, head_dim=16), "head_dim: 8 at prefill-0, 16 {}"),
        (FACTS, replace(FACTS, block_size=6), "block_size, not a multiple: 4 at prefill-0, 6 {}"),
        (FACTS, TRANSPOSED, "order of keys: 'plain' at prefill-0, 'transposed' {}"),
        (
            TRANSPOSED,
            replace(TRANSPOSED, block_size=8),
            "block_size: 4 at prefill-0, 8 {}, which only engines with cache.key_order plain may have",
        ),
        (
            FACTS,
            replace(FACTS, further_groups=(GROUP,)),
            f"further groups of layers: () at prefill-0, ({GROUP!r},) {{}}",
        ),
        (
            ON_GPU,
            replace(ON_GPU, block_size=8),
            "block_size: 4 at prefill-0, 8 {}, which only engines on CPUs may have",
        ),
        (
            FACTS,
            replace(FACTS, dtype="float16", block_size=6),
            "dtype: 'float32' at prefill-0, 'float16' {}; block_size, not a multiple: 4 at prefill-0, 6 {}",
        ),
    ],
)
def test_what_engines_disagree_on_is_named_with_both_values(one: PairingFacts, other: PairingFacts, says: str) -> None:
    assert mismatch(one, other) == says.format("at decode-1", "at decode-1")
    assert mismatch(other, one) is not None


LAYOUTS = st.builds(
    KVCacheLayout,
    num_blocks=st.integers(1, 3),
    num_kv_heads=st.integers(1, 2),
    num_layers=st.integers(1, 2),
    block_size=st.sampled_from([4, 6, 8]),
    head_dim=st.sampled_from([8, 16]),
    dtype=st.sampled_from(["float32", "float16"]),
    dtype_size_bytes=st.just(4),
    model_fingerprint=st.sampled_from("ab"),
    key_order=st.sampled_from([*KeyOrder, "amx"]),
)
HELLOS = st.builds(
    Hello,
    protocol_version=st.sampled_from([PROTOCOL_VERSION, 99]),
    engine_id=st.just("decode-1"),
    incarnation=st.just(1),
    peer_engine_id=st.just("prefill-0"),
    peer_incarnation=st.just(1),
    transport=st.sampled_from(["tcp", "nccl"]),
    layout=LAYOUTS | st.just(LAYOUT),
    checksum=st.booleans(),
    is_on_gpu=st.booleans(),
)


@given(consumer=HELLOS, layout=LAYOUTS | st.just(LAYOUT), checksum=st.booleans(), is_on_gpu=st.booleans())
def test_a_handshake_refuses_exactly_what_a_router_avoids(
    consumer: Hello, layout: KVCacheLayout, checksum: bool, is_on_gpu: bool
) -> None:
    producer = PairingFacts.of_rank(layout, "tcp", checksum=checksum, is_on_gpu=is_on_gpu)
    handshake = find_disagreement(consumer, "prefill-0", 1, layout, producer)
    router = find_mismatch(producer, PairingFacts.of_hello(consumer), "prefill-0", "decode-1")
    assert (handshake is None) == (router is None)
