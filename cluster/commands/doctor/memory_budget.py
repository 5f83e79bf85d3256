"""The memory budget of a rank: whether the model fits, and for how many tokens of KV room is left. Pure arithmetic.

A rank holds its share of every matrix, and all embeddings and norms (actors/model/tensor_parallel/plan.py). Sizes of
weights and blocks are exact. The size of activations is an upper estimate; the engine itself measures it. On a GPU,
CUDA's context and NCCL's buffers take memory too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from actors.config import EngineConfig
from actors.model.cache.kv_cache_size import choose_num_blocks
from actors.model.errors import KVCacheTooSmall
from cluster.commands.doctor.checkpoint import Checkpoint
from cluster.commands.doctor.findings import GIB, Finding, failure, gib, ok, warning
from cluster.commands.doctor.kv_figures import KVFigures, kv_figures

GPU_MEMORY_GIB: Final = {"a100": 79.2, "h100": 79.6, "h200": 139.8, "b200": 178.4, "l40s": 44.5}
"""The free memory that CUDA reports on an idle GPU of each kind, in GiB."""

_CUDA_BYTES: Final = GIB
_WHOLE_ON_EVERY_RANK: Final = re.compile(r"embed|wte|wpe")
_TP_SIZES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of one rank and its use.

    free_bytes:       the memory that is free before anything is loaded
    weight_bytes, activation_bytes: the memory for weights, and the largest step's activations
    block_size_bytes: the part of one block's KV on this rank; block_size: tokens of a block
    num_blocks:       blocks of the engine's KV cache
    max_model_len:    the longest prompt and output together, in tokens
    """

    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    block_size_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose KV fits into the cache, over all requests at once."""
        return self.num_blocks * self.block_size


def weight_bytes(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    """Return the size of the model's weights on one rank, in bytes."""
    tp_size = engine.parallel.tensor_parallel_size
    is_tied = bool(checkpoint.text_config.get("tie_word_embeddings"))
    num_elements = 0
    for weight in checkpoint.weights:
        if is_tied and weight.name.startswith("lm_head."):
            continue
        is_whole = len(weight.shape) < 2 or _WHOLE_ON_EVERY_RANK.search(weight.name) is not None
        num_elements += weight.num_elements if is_whole else -(-weight.num_elements // tp_size)
    return num_elements * checkpoint.dtype_bytes(engine.model.dtype)


def activation_bytes(checkpoint: Checkpoint, engine: EngineConfig) -> int:
    """Return an upper estimate of the largest step's activations on one rank, in bytes.

    These are the inputs and results of one layer, and the logits in float32.
    """
    tp_size, scheduler = engine.parallel.tensor_parallel_size, engine.scheduler
    hidden = checkpoint.number("hidden_size", "n_embd")
    between = checkpoint.number("intermediate_size", "n_inner") or 4 * hidden
    heads = checkpoint.num_heads + 2 * checkpoint.num_kv_heads
    per_token = 4 * hidden + (3 * between + 2 * heads * checkpoint.head_dim) // tp_size
    logits = scheduler.max_num_seqs * checkpoint.number("vocab_size") * 4 * 3
    return scheduler.max_num_batched_tokens * per_token * checkpoint.dtype_bytes(engine.model.dtype) + logits


def plan_memory(
    checkpoint: Checkpoint, engine: EngineConfig, free_bytes: int, *, is_gpu: bool, num_threads: int = 1
) -> MemoryBudget:
    """Return the budget of one rank.

    free_bytes: the free memory of the rank's GPU, or the rank's part of the host's free memory
    num_threads: the threads of a rank that computes on a CPU
    Raises KVCacheTooSmall if too little memory is left for the KV cache, ValueError if the KV heads cannot be shared by
    so many ranks.
    """
    tp_size = engine.parallel.tensor_parallel_size
    block_size = engine.cache.block_size
    figures = figures_of(checkpoint, engine)
    block_size_bytes = block_size * figures.rank_bytes_per_token(tp_size)
    weights, activations = weight_bytes(checkpoint, engine), activation_bytes(checkpoint, engine)
    left = free_bytes - weights - activations - (_CUDA_BYTES if is_gpu else 0)
    max_model_len = engine.model.max_model_len or checkpoint.max_model_len
    num_blocks = choose_num_blocks(
        engine.cache,
        engine.scheduler,
        block_size_bytes=block_size_bytes,
        max_model_len=max_model_len,
        free_memory_bytes=left,
        is_gpu=is_gpu,
        num_threads=num_threads,
        num_state_blocks=figures.num_state_blocks(tp_size),
    )
    if num_blocks * block_size_bytes > left:
        raise KVCacheTooSmall(
            f"the KV cache needs {gib(num_blocks * block_size_bytes)} for {num_blocks} blocks, but only "
            f"{gib(max(left, 0))} are left"
        )
    return MemoryBudget(free_bytes, weights, activations, block_size_bytes, block_size, num_blocks, max_model_len)


def figures_of(checkpoint: Checkpoint, engine: EngineConfig) -> KVFigures:
    """Return the sizes of the checkpoint's KV with an engine's settings."""
    dtype_bytes = checkpoint.dtype_bytes(engine.model.dtype)
    return kv_figures(checkpoint.text_config, dtype_bytes=dtype_bytes, block_size=engine.cache.block_size)


def describe_kv(checkpoint: Checkpoint, engine: EngineConfig) -> Finding:
    """Tell the sizes of the checkpoint's KV, and what a handoff moves. engine: the settings of decode engines"""
    figures, tp_size = figures_of(checkpoint, engine), engine.parallel.tensor_parallel_size
    check = "KV cache"
    try:
        moved, blocks = figures.transfer_bytes_per_token(tp_size), figures.blocks_per_gib(tp_size)
    except ValueError as error:
        return failure(check, str(error), "choose another parallel.tensor_parallel_size")
    state = f", {figures.state_bytes} bytes of recurrent state a request" if figures.state_bytes else ""
    return ok(
        check,
        f"{figures.bytes_per_token} bytes a token in {checkpoint.dtype(engine.model.dtype)}{state}; "
        f"{blocks} blocks of {figures.block_size} tokens fit into a GiB{' of a rank' if tp_size > 1 else ''}; "
        f"a handoff moves {moved} bytes a token",
    )


def check_budget(
    name: str, checkpoint: Checkpoint, engine: EngineConfig, free_bytes: int, *, is_gpu: bool, num_threads: int = 1
) -> Finding:
    """Check whether an engine's memory suffices. name: the engines' role; the other parameters as in plan_memory()"""
    check = f"memory of {name} engines"
    tp_size = engine.parallel.tensor_parallel_size
    weights = weight_bytes(checkpoint, engine)
    each = f"each of {tp_size} ranks" if tp_size > 1 else "the engine"
    needs = f"{each} has {gib(free_bytes)} and needs {gib(weights)} for weights"
    try:
        budget = plan_memory(checkpoint, engine, free_bytes, is_gpu=is_gpu, num_threads=num_threads)
    except KVCacheTooSmall as error:
        return failure(check, f"{needs}; {error}", _what_fits(checkpoint, engine, free_bytes, is_gpu=is_gpu))
    except ValueError as error:
        return failure(check, str(error), "choose another parallel.tensor_parallel_size")
    blocks = f"{budget.num_blocks} blocks, {budget.num_tokens} tokens at once"
    longest = budget.num_tokens // budget.max_model_len
    found = f"{needs}, about {gib(budget.activation_bytes)} for activations: {blocks}"
    if longest < 2:
        advice = f"one request of {budget.max_model_len} tokens fills it: lower model.max_model_len, or more ranks"
        return warning(check, found, advice)
    return ok(check, f"{found}, {longest} requests of {budget.max_model_len} tokens")


def _what_fits(checkpoint: Checkpoint, engine: EngineConfig, free_bytes: int, *, is_gpu: bool) -> str:
    """Return advice: the smallest change of the settings with which the model fits."""
    for tp_size in _TP_SIZES:
        if tp_size <= engine.parallel.tensor_parallel_size or checkpoint.num_heads % tp_size:
            continue
        wider = engine.model_copy(
            update={"parallel": engine.parallel.model_copy(update={"tensor_parallel_size": tp_size})}
        )
        if _fits(checkpoint, wider, free_bytes, is_gpu=is_gpu):
            return f"parallel.tensor_parallel_size = {tp_size} fits"
    length = engine.model.max_model_len or checkpoint.max_model_len
    while (length := length // 2) >= engine.cache.block_size:
        shorter = engine.model_copy(update={"model": engine.model.model_copy(update={"max_model_len": length})})
        if _fits(checkpoint, shorter, free_bytes, is_gpu=is_gpu):
            return f"model.max_model_len = {length} fits"
    return "a smaller model, a smaller dtype, or more memory"


def _fits(checkpoint: Checkpoint, engine: EngineConfig, free_bytes: int, *, is_gpu: bool) -> bool:
    try:
        plan_memory(checkpoint, engine, free_bytes, is_gpu=is_gpu)
    except (KVCacheTooSmall, ValueError):
        return False
    return True
