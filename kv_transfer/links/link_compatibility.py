"""Decides whether KV can travel between two engines: one rule, for the handshake and for the router.

An engine knows the facts that it must have in common with a peer once its model is loaded. The facts go to the router
with the engine's address, and to a peer in Hello. The rule does not decide which ranks send to which: layout.py plans
that for any two engines whose models have the same number of KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from kv_transfer.handoff.control_messages import PROTOCOL_VERSION, Hello
from kv_transfer.layout import KeyOrder, KVCacheLayout, KVGroup


@dataclass(frozen=True, slots=True)
class PairingFacts:
    """The facts of an engine that another one must share to exchange KV with it.

    transport:    as in KVTransferConfig.transport, but never auto
    num_kv_heads: of the model, over all ranks
    key_order: as in KVCacheLayout
    further_groups: as in KVCacheLayout, each with the KV heads of all ranks
    value_size: as in KVCacheLayout
    """

    protocol_version: int
    transport: str
    checksum: bool
    model_fingerprint: str
    dtype: str
    num_kv_heads: int
    num_layers: int
    head_dim: int
    block_size: int
    is_on_gpu: bool
    key_order: str = KeyOrder.PLAIN
    further_groups: tuple[KVGroup, ...] = ()
    value_size: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all layers have KV of one shape and V is as wide as K."""
        return not self.further_groups and self.value_size in (None, self.head_dim)

    @classmethod
    def of_rank(
        cls,
        layout: KVCacheLayout,
        transport: str,
        *,
        checksum: bool,
        is_on_gpu: bool,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> Self:
        """Make the facts of an engine from those of any of its ranks. layout: the rank's."""
        return cls(
            protocol_version=protocol_version,
            transport=transport,
            checksum=checksum,
            model_fingerprint=layout.model_fingerprint,
            dtype=layout.dtype,
            num_kv_heads=layout.total_num_kv_heads,
            num_layers=layout.num_layers,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            is_on_gpu=is_on_gpu,
            key_order=str(layout.key_order),
            further_groups=tuple(
                replace(group, num_kv_heads=group.num_kv_heads * layout.tp_size // group.num_replicas, num_replicas=1)
                for group in layout.further_groups
            ),
            value_size=layout.value_size,
        )

    @classmethod
    def of_hello(cls, hello: Hello) -> Self:
        """Make the facts of the engine that sent this Hello."""
        return cls.of_rank(
            hello.layout,
            hello.transport,
            checksum=hello.checksum,
            is_on_gpu=hello.is_on_gpu,
            protocol_version=hello.protocol_version,
        )


def find_mismatch(one: PairingFacts, other: PairingFacts, at_one: str, at_other: str) -> str | None:
    """Return why KV cannot travel between the two engines, with both values of what differs; None if it can.

    The rule is symmetric. The number of blocks does not matter. Block sizes may differ on CPUs, if one is a multiple of
    the other and K has the plain order: the transposed order mixes the tokens of a block, so a block cannot be cut.
    The blocks of a model whose layers form several groups are not cut either.
    Block sizes must not differ on a GPU, where the copies of a chunk that is cut into pieces are not ordered against
    the compute stream.
    at_one, at_other: the engines' names in the text, such as "prefill-0" or "the consumer"
    """
    if one == other:
        return None
    pairs = {
        "protocol version": (one.protocol_version, other.protocol_version),
        "transport": (one.transport, other.transport),
        "checksum": (one.checksum, other.checksum),
        "model": (one.model_fingerprint, other.model_fingerprint),
        "dtype": (one.dtype, other.dtype),
        "num_kv_heads of all ranks": (one.num_kv_heads, other.num_kv_heads),
        "num_layers": (one.num_layers, other.num_layers),
        "head_dim": (one.head_dim, other.head_dim),
        "order of keys": (str(one.key_order), str(other.key_order)),
        "value_size": (one.value_size, other.value_size),
        "further groups of layers": (one.further_groups, other.further_groups),
    }
    mismatches = [f"{name}: {a!r} at {at_one}, {b!r} at {at_other}" for name, (a, b) in pairs.items() if a != b]
    sizes = f"{one.block_size} at {at_one}, {other.block_size} at {at_other}"
    small, large = sorted((one.block_size, other.block_size))
    if large % small:
        mismatches.append(f"block_size, not a multiple: {sizes}")
    elif large != small and (one.is_on_gpu or other.is_on_gpu):
        mismatches.append(f"block_size: {sizes}, which only engines on CPUs may have")
    elif large != small and not (one.is_plain and other.is_plain):
        mismatches.append(f"block_size: {sizes}, which only models may have whose layers all have KV of one shape")
    elif large != small and one.key_order == other.key_order != KeyOrder.PLAIN:
        mismatches.append(f"block_size: {sizes}, which only engines with cache.key_order plain may have")
    return "; ".join(mismatches) or None
