"""The interface of attention backends: what computes a step's attention over the paged KV cache.

A backend is one file with two classes. Its *kind* (AttentionBackendKind) answers, before there is a cache, which models
and orders of K the backend covers. The *backend* (AttentionBackend) belongs to one KV cache, and makes a BatchAttention
for each step, which every layer then uses. choice.py lists the kinds and chooses one.

What a backend must provide:

- **Which models it covers.** find_obstacle() gets all that the model asks for (AttentionNeeds) and returns in one
  sentence why the backend cannot serve it, or None. It also says whether the backend runs on this machine: its package
  is installed, of the right version, the device and the processor are suitable.
- **Writing K and V.** attend() stores this step's keys and values before it reads the cache. The slots follow from
  BatchShape: token j of request i, which is the request's token p, goes to slot p % block_size of block
  block_tables[i, p // block_size].
- **Attention over a flattened batch.** A step has decoding requests (one token), chunks of prompts, and several tokens
  of drafts, in any mixture and order, with any number of tokens before them in the cache. Short chunks must not cost a
  call for each request.
- **Metadata once a step.** prepare() does all that depends on the batch only: slots, lengths, block tables on the
  device, the distribution of work. attend() is called once for each layer, with nothing left to plan.
- **Orders of K.** V is always [block_size, head_dim] in a tile, one block of one head and layer. K is in one of the
  orders of KeyOrder; the backend reads and writes all of those that key_orders() lists, the fastest first. The cluster
  chooses one order for all engines. `torch` supports both, so that every CPU can join the cluster; `vllm_cpu` supports
  the transposed one, `triton` the plain one.
- **Groups.** The layers of a model may differ in the shape of their KV, read the KV of other layers, or attend within
  chunks. A backend that does not serve that refuses with KVGeometry.irregularity. `torch` serves all of it,
  `triton` all but latent attention and
  recurrent states.
- **Finite numbers.** A slot that no token has written holds finite numbers, because other backends multiply what a
  masked slot holds by a weight of zero. So prepare() fills a block with zeros if a request begins it in this step and
  does not fill it (begun_blocks() lists these blocks).
- **The self-check.** backend_check.py computes a small batch with the layers, heads and dtype of the model, in the
  cache's order of K, and compares the result with attention written out in float32. A backend other than `torch` is
  used only after it has passed; it has nothing to implement for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from actors.model.attention.batch_attention import BatchAttention, BatchShape
from actors.model.attention.probe import KVGeometry
from kv_transfer.layout import KeyOrder


class BackendName(StrEnum):
    """The names of the backends, as in the setting cache.attention_backend."""

    TORCH = "torch"
    VLLM_CPU = "vllm_cpu"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """All that a model and a KV cache ask of a backend.

    dtype:     of the KV cache, and of queries, keys and values
    geometry:  heads and head sizes of this rank by groups of layers, and what each layer asks for: window, soft-cap,
        direction, sinks
    key_order: the order of K in the cache
    """

    device: torch.device
    dtype: torch.dtype
    geometry: KVGeometry
    block_size: int
    key_order: KeyOrder


class AttentionBackend(Protocol):
    """Attention over one KV cache. One thread uses it, the engine thread."""

    @property
    def kv_cache(self) -> Tensor:
        """The cache, contiguous, of the shape that KVCacheLayout.shape says.

        K's tiles hold their numbers in the cache's KeyOrder, whatever the shape says.
        """

    def prepare(self, shape: BatchShape) -> BatchAttention:
        """Plan one step. The plan is valid until the next call.

        Blocks that begin and are not filled in this step become zeros.
        """


class AttentionBackendKind(Protocol):
    """A kind of backend: which models it covers, and how to make one for a KV cache."""

    @property
    def name(self) -> BackendName:
        """The name in the settings, the log and `raypd status`."""

    def key_orders(self, needs: AttentionNeeds) -> tuple[KeyOrder, ...]:
        """Return the orders of K that the backend reads and writes, the fastest first; needs.key_order is ignored."""

    def find_obstacle(self, needs: AttentionNeeds) -> str | None:
        """Return why the backend cannot serve these needs on this machine, or None. needs.key_order counts, too."""

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> AttentionBackend:
        """Make the backend of a cache, for needs without an obstacle.

        kv_cache: of the shape that KVCacheLayout.shape says, on needs.device, of needs.dtype
        """
