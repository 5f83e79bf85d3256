"""Does it pay to read a long common prompt's keys once for the whole decode batch?

One decode step's attention in one layer, by the engine's own backend: every sequence has the same prompt and an own
part after it. The two ways take turns, and the fastest of each counts: the machine may have other things to do.

    python -m benchmarks.cascade --kv-heads 8 --group 4 --head-dim 128
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from actors.model.attention import cascade
from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchAttention

_BLOCK_SIZE = 16
_NUM_OWN_TOKENS = 64
_MAX_GATHERED_BYTES = 3 * 2**30


def run(
    kv_heads: Annotated[int, typer.Option()] = 8,
    group: Annotated[int, typer.Option(help="Query heads of one KV head.")] = 4,
    head_dim: Annotated[int, typer.Option()] = 128,
    dtype: Annotated[str, typer.Option()] = "float32",
    batches: Annotated[str, typer.Option()] = "2,4,8,16,32,64",
    prefixes: Annotated[str, typer.Option()] = "128,512,2048,4096",
    rounds: Annotated[int, typer.Option()] = 5,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print milliseconds per layer and decode step, each for itself and read once."""
    torch.set_num_threads(threads)
    # Here it is to be seen where it pays.
    cascade._MIN_SEQUENCES, cascade._MIN_TOKENS = 1, 1
    table = Table("batch", "common tokens", "each for itself (ms)", "read once (ms)", "times as fast", title=dtype)
    for num_sequences in map(int, batches.split(",")):
        for num_tokens in map(int, prefixes.split(",")):
            bytes_each = num_tokens * kv_heads * head_dim * 2 * getattr(torch, dtype).itemsize
            if num_sequences * bytes_each > _MAX_GATHERED_BYTES:
                continue
            apart, once = _measure(num_sequences, num_tokens, (kv_heads, group, head_dim), dtype, rounds)
            table.add_row(str(num_sequences), str(num_tokens), f"{apart:.2f}", f"{once:.2f}", f"{apart / once:.2f}")
    Console().print(table)


@torch.inference_mode()
def _measure(
    num_sequences: int, num_tokens: int, heads: tuple[int, int, int], dtype: str, rounds: int
) -> tuple[float, float]:
    kv_heads, group, head_dim = heads
    num_common, num_own = num_tokens // _BLOCK_SIZE, _NUM_OWN_TOKENS // _BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(
        (num_common + num_sequences * num_own, kv_heads, 1, 2, _BLOCK_SIZE, head_dim), generator=generator
    ).to(getattr(torch, dtype))
    layer = AttentionLayer(index=0, scaling=head_dim**-0.5, softcap=None, sliding_window=None)
    backend = TorchAttention(cache, KVGeometry(kv_heads * group, kv_heads, head_dim, (layer,)), _BLOCK_SIZE)
    own = num_common + np.arange(num_sequences * num_own).reshape(num_sequences, num_own)
    tables = np.concatenate([np.tile(np.arange(num_common), (num_sequences, 1)), own], axis=1)
    seq_lens = np.full(num_sequences, num_common * _BLOCK_SIZE + _NUM_OWN_TOKENS)
    states = torch.randn((kv_heads, num_sequences, head_dim), generator=generator).to(cache.dtype)
    query = torch.randn((kv_heads * group, num_sequences, head_dim), generator=generator).to(cache.dtype)
    best_s, outputs = [float("inf")] * 2, []
    for _ in range(rounds):
        for which, num_shared in enumerate((0, num_common)):
            shape = BatchShape(np.arange(num_sequences + 1), seq_lens - 1, tables, num_shared)
            batch = backend.prepare(shape)
            started_s = time.perf_counter()
            outputs.append(batch.attend(layer, query, states, states))
            best_s[which] = min(best_s[which], time.perf_counter() - started_s)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)
    return best_s[0] * 1e3, best_s[1] * 1e3


if __name__ == "__main__":
    typer.run(run)
