"""How long do the experts of a mixture take, one expert after the other and grouped? `python -m benchmarks.experts`

transformers' own experts module of Qwen3-MoE computes the same tokens in each of transformers' ways: `eager` is a loop
over the experts that were chosen, `batched_mm` copies the weights of each token's experts and multiplies once,
`grouped_mm` sorts the tokens by expert and multiplies once, which is how transformers loads a model if nothing else is
asked for. The ways take turns, and the fastest of each counts: the machine may have other things to do.
"""

from __future__ import annotations

import time
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

_WAYS: Final = ("eager", "batched_mm", "grouped_mm")
_MAX_COPIED_BYTES: Final = 3 * 2**30
"""batched_mm is left out where it would copy more."""
_ERROR: Final = {"float32": 1e-4, "bfloat16": 5e-2}


def run(
    experts: Annotated[int, typer.Option()] = 64,
    active: Annotated[int, typer.Option(help="Experts that each token goes through.")] = 8,
    hidden: Annotated[int, typer.Option()] = 1024,
    features: Annotated[int, typer.Option(help="Intermediate features of one expert.")] = 512,
    tokens: Annotated[str, typer.Option()] = "1,16,512",
    dtype: Annotated[str, typer.Option()] = "float32",
    rounds: Annotated[int, typer.Option()] = 7,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print milliseconds of one layer's experts."""
    torch.set_num_threads(threads)
    config = Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=active, hidden_size=hidden, moe_intermediate_size=features
    )
    generator = torch.Generator().manual_seed(0)
    module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]  # left untyped
    module.to(getattr(torch, dtype))
    for weight in module.parameters():
        weight.data.normal_(std=0.03, generator=generator)
    table = Table("tokens", *(f"{way} (ms)" for way in _WAYS), title=f"{dtype}, {threads} thread(s)")
    for num_tokens in map(int, tokens.split(",")):
        states = torch.randn(num_tokens, hidden, generator=generator).to(getattr(torch, dtype))
        chosen = torch.rand(num_tokens, experts, generator=generator).topk(active).indices
        weights = torch.rand(num_tokens, active, generator=generator).to(getattr(torch, dtype))
        best_ms = _measure(module, (states, chosen, weights), rounds, _ERROR[dtype])
        table.add_row(str(num_tokens), *(f"{best_ms[way]:.2f}" if way in best_ms else "-" for way in _WAYS))
    Console().print(table)


@torch.inference_mode()
def _measure(
    module: Qwen3MoeExperts, inputs: tuple[Tensor, Tensor, Tensor], rounds: int, max_error: float
) -> dict[str, float]:
    copied_bytes = inputs[1].numel() * sum(weight[0].nbytes for weight in module.parameters())
    ways = [way for way in _WAYS if way != "batched_mm" or copied_bytes <= _MAX_COPIED_BYTES]
    best_ms, outputs = dict.fromkeys(ways, float("inf")), dict[str, Tensor]()
    for _ in range(rounds):
        for way in ways:
            setattr(module.config, "_experts_implementation", way)  # noqa: B010  # untyped
            started_s = time.perf_counter()
            outputs[way] = module(*inputs)
            best_ms[way] = min(best_ms[way], (time.perf_counter() - started_s) * 1e3)
    for output in outputs.values():
        torch.testing.assert_close(output, outputs["eager"], atol=max_error, rtol=max_error)
    return best_ms


if __name__ == "__main__":
    typer.run(run)
