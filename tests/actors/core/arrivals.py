"""Strategies for the property machine of one engine: how the engine is set up, and which requests come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st

from actors.core.requests.multimodal import MultiModalFeature
from kv_transfer.params import TransferRole
from tests.actors.core.builders import BLOCK_SIZE
from tests.actors.core.chunk_bounds import ROLES, ChunkBound

CHUNK_BOUNDS = st.builds(
    ChunkBound, itl_s=st.sampled_from([None, None, 1e-3, 14e-3, 18e-3, 30e-3]), role=st.sampled_from(ROLES)
)


@dataclass(frozen=True)
class Setup:
    """An engine. A machine tries many of a few features each: with all of them at once, most are refused or rare.

    kinds: which features requests may have, see Arrival
    depth: steps under way at once, with and without overlap
    num_state_blocks: of the recurrent state of a request, which no draft can be taken back out of
    bound: of chunks of prompts beside decodes
    """

    num_blocks: int
    max_num_seqs: int
    budget: int
    chunked: bool
    threshold: int
    policy: Any
    failure: Any
    caching: bool
    watermark: float
    max_reserved: int
    overlap: bool
    depth: int
    num_drafts: int
    num_lookahead: int
    max_loras: int
    encoder_size: int
    ageing_s: float | None
    fairness: Any
    num_host_blocks: int
    stores_all: bool
    num_state_blocks: int
    bound: ChunkBound
    kinds: frozenset[str]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * BLOCK_SIZE


KINDS = ("handoff", "deadline", "resumed", "lora", "grammar", "pooling", "image", "shared")

SETUPS = st.builds(
    Setup,
    num_blocks=st.integers(4, 14),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(4, 24),
    chunked=st.sampled_from([True, True, False]),
    threshold=st.sampled_from([0, 0, 3, 13]),
    policy=st.sampled_from(["fcfs", "priority"]),
    failure=st.sampled_from(["recompute", "fail"]),
    caching=st.sampled_from([True, True, False]),
    watermark=st.sampled_from([0.0, 0.0, 0.1]),
    max_reserved=st.integers(1, 3),
    overlap=st.booleans(),
    depth=st.integers(1, 4),
    num_drafts=st.sampled_from([0, 0, 3]),
    num_lookahead=st.sampled_from([0, 0, 5]),
    max_loras=st.integers(1, 3),
    encoder_size=st.integers(4, 9),
    ageing_s=st.sampled_from([None, 2.0]),
    fairness=st.sampled_from(["none", "ingress", "tenant"]),
    num_host_blocks=st.sampled_from([0, 0, 3, 20]),
    stores_all=st.sampled_from([False, False, True]),
    num_state_blocks=st.sampled_from([0, 0, 0, 1, 2]),
    bound=CHUNK_BOUNDS,
    kinds=st.frozensets(st.sampled_from(KINDS)),
)


def show_images(setup: Setup) -> Setup:
    """The same engine, for short prompts with images, computed in chunks, whose order and victims priorities choose."""
    return replace(
        setup,
        num_blocks=4 + setup.num_blocks % 5,
        max_num_seqs=1 + setup.max_num_seqs,
        chunked=True,
        threshold=4,
        policy="priority",
        depth=max(2, setup.depth),
        num_drafts=0,
        watermark=0.0,
        encoder_size=9,
        kinds=frozenset({"image"}),
    )


def share_slots(setup: Setup) -> Setup:
    """The same engine, with adapters, and fewer slots for them than there are adapters."""
    return replace(
        setup,
        num_blocks=4 + setup.num_blocks,
        max_num_seqs=3 + setup.max_num_seqs,
        budget=8 + setup.budget,
        max_loras=1 + setup.max_loras % 2,
        kinds=setup.kinds | {"lora"},
    )


def keep_states(setup: Setup) -> Setup:
    """The same engine, for prompts that begin alike, with recurrent states and a prefix cache, in pools of any size."""
    return replace(
        setup,
        num_blocks=setup.num_blocks + 4 * (setup.num_blocks % 4),
        chunked=True,
        caching=True,
        num_drafts=0,
        stores_all=setup.stores_all or setup.budget % 2 == 0,
        num_state_blocks=1 + setup.budget % 3,
        kinds=setup.kinds - {"image", "lora"} | {"shared", "handoff"},
    )


@dataclass(frozen=True)
class Arrival:
    """A request. num_left: its prompt fills the whole pool but for so many slots; None: num_shared and num_own say."""

    num_shared: int
    num_own: int
    num_left: int | None
    max_tokens: int
    priority: int
    role: TransferRole | None
    deadline_in_s: float | None
    num_resumed: int
    is_ready: bool
    tenant: str
    lora_name: str | None
    has_grammar: bool
    is_pooling: bool
    items: list[tuple[int, int]]
    """Each: tokens of text before it, and its size."""

    def prompt(self, number: int, setup: Setup) -> list[int]:
        """number: of the request. What is shared begins every prompt; odd ones share the rest, too."""
        num_shared = self.num_shared if "shared" in setup.kinds else 0
        num_own = self.num_own
        if self.num_left is not None:
            num_own = setup.num_slots - self.num_left - num_shared
        own_first = 100 if num_own % 2 and "shared" in setup.kinds else 1000 * number
        return [*range(1, num_shared + 1), *range(own_first, own_first + num_own)] or [1]


ARRIVALS = st.builds(
    Arrival,
    num_shared=st.sampled_from([0, 4, 7, 8, 12]),
    num_own=st.integers(0, 16),
    num_left=st.sampled_from([None, None, None, 0, 1, 2, 5, 9]),
    max_tokens=st.integers(1, 16),
    priority=st.integers(0, 2),
    role=st.sampled_from([None, *TransferRole]),
    deadline_in_s=st.sampled_from([None, None, None, 5.0]),
    num_resumed=st.sampled_from([0, 0, 2]),
    is_ready=st.booleans(),
    tenant=st.sampled_from(["a", "b"]),
    lora_name=st.sampled_from([None, None, "x", "y", "z"]),
    has_grammar=st.sampled_from([False, False, False, True]),
    is_pooling=st.sampled_from([False, False, False, True]),
    items=st.lists(st.tuples(st.sampled_from([0, 1, 3, 4, 8, 12]), st.integers(1, 4)), max_size=3),
)


def place_items(items: list[tuple[int, int]], num_prompt_tokens: int) -> list[MultiModalFeature]:
    """Return as many of the items as the prompt has room for."""
    features: list[MultiModalFeature] = []
    offset = 0
    for gap, size in items:
        offset += gap
        if offset + size > num_prompt_tokens:
            break
        features.append(MultiModalFeature(f"item-{size}", offset, size, size))
        offset += size
    return features
