"""The facts of a loaded model that the rest of the engine and the ingresses need."""

from __future__ import annotations

from dataclasses import dataclass

from actors.checkpoint.pooling_facts import PoolingFacts
from actors.core.requests.request_limits import ImageFacts, RequestLimits
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.link_compatibility import PairingFacts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a loaded model that the rest of the engine, and the ingresses, must know.

    layout: layout of rank 0's KV cache
    further_rank_addresses: addresses of ranks 1, 2, … for KV transfers, see EngineAddress
    kv_transport: name of the transport that carries KV, for display
    pairing: facts that decide with which engines KV can be exchanged; None if they are not known
    generates: whether the model generates tokens; if not, it only gives vectors
    pooling: the vectors that the model gives; None if it gives none
    prompt_embeds_size: size of one token's embedding in a prompt; 0 if prompts cannot be embeddings
    dtype: data type that the model computes in, and that a prompt's embeddings are cast to
    images: arrays that the encoder takes; None if the model takes no images
    attention_backend, attention_reason: name of the backend that computes attention, and why it was chosen, for display
    linear_layers: whether the order of their weights is oneDNN's, and why not, for display
    cpu_threads: number of torch's threads and their cores, or why they compute on any, for display
    cuda_graphs: the batch sizes that were captured, or that steps of one token are compiled, or why not, for display
    left_out_inputs: the model's inputs that are not served, such as "images and sound", for display
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layout: KVCacheLayout
    further_rank_addresses: tuple[str, ...] = ()
    kv_transport: str = ""
    pairing: PairingFacts | None = None
    generates: bool = True
    pooling: PoolingFacts | None = None
    prompt_embeds_size: int = 0
    images: ImageFacts | None = None
    dtype: str = "float32"
    attention_backend: str = ""
    attention_reason: str = ""
    linear_layers: str = ""
    cpu_threads: str = ""
    cuda_graphs: str = ""
    left_out_inputs: str = ""

    @property
    def request_limits(self) -> RequestLimits:
        """Return the limits that the engine checks each request against when the request enters it."""
        return RequestLimits(
            vocab_size=self.vocab_size,
            num_kv_heads=self.layout.total_kv_heads_of_groups,
            prompt_embeds_size=self.prompt_embeds_size,
            embedding_size=0 if self.pooling is None else self.pooling.embedding_size,
            images=self.images,
        )
