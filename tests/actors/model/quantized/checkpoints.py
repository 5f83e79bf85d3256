"""Small quantized checkpoints of a Llama, written number by number as their formats define them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.core.requests.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, logprobs_after, random_prompt

Quantize = Callable[[str, Tensor], dict[str, Tensor]]
"""Turns a layer's weight, by its name without the last part, into the tensors that a format stores."""

_BLOCK: Final = 32
_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = 448.0
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_TOKENS: Final = 8
TIE: Final = 0.2
"""The tests allow this much to formats that round inputs; see assert_served_as_by_transformers()."""


def rewrite(directory: Path, quantize: Quantize, settings: dict[str, Any], **overrides: Any) -> Path:
    """Write a checkpoint whose layers but the last one are quantized."""
    make_checkpoint("llama", directory, hidden_size=64, intermediate_size=96, **overrides)
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        owner = name.removesuffix(".weight")
        weights |= quantize(owner, weight) if owner.endswith("_proj") else {name: weight}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    return directory


def fp8_blocks(directory: Path, **overrides: Any) -> Path:
    """8-bit floating-point numbers with a scale for each block of 32 x 32."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.view(weight.shape[0] // _BLOCK, _BLOCK, weight.shape[1] // _BLOCK, _BLOCK)
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / _FP8_MAX
        return {
            f"{owner}.weight": (blocks / scales).flatten(2).flatten(0, 1).to(_FP8),
            f"{owner}.weight_scale_inv": scales[:, 0, :, 0],
        }

    settings = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic"}
    return rewrite(directory, quantize, settings, **overrides)


def mxfp8(directory: Path) -> Path:
    """8-bit floating-point numbers, and for 32 of a row a byte with the exponent of their scale, a power of two."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        groups = weight.view(len(weight), -1, _BLOCK)
        exponents = (groups.abs().amax(dim=2, keepdim=True) / _FP8_MAX).log2().ceil()
        return {
            f"{owner}.weight": (groups / exponents.exp2()).flatten(1).to(_FP8),
            f"{owner}.weight_scale_inv": (exponents[..., 0] + 127).to(torch.uint8),
        }

    settings = {"quant_method": "mxfp8", "weight_block_size": [1, _BLOCK], "scale_fmt": "ue8m0"}
    return rewrite(directory, quantize, settings)


def compressed_fp8(directory: Path, *, rounds_inputs: bool) -> Path:
    """compressed-tensors: 8-bit floating-point numbers with a scale for each row, and of inputs for each token."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(dim=1, keepdim=True) / _FP8_MAX
        return {f"{owner}.weight": (weight / scales).to(_FP8), f"{owner}.weight_scale": scales}

    return rewrite(directory, quantize, _compressed("float-quantized", "float", rounds_inputs))


def compressed_int8(directory: Path) -> Path:
    """compressed-tensors' W8A8: 8-bit integers."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return {f"{owner}.weight": (weight / scales).round().to(torch.int8), f"{owner}.weight_scale": scales}

    return rewrite(directory, quantize, _compressed("int-quantized", "int", True))


def compressed_int4(directory: Path) -> Path:
    """compressed-tensors' W4A16: 4-bit integers, eight of them in 32 bits, with a scale for 32 numbers of a row."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        groups = weight.view(len(weight), -1, _BLOCK)
        scales = groups.abs().amax(dim=2, keepdim=True) / 7
        # Stored without a sign: the number plus 8, the first of eight in the lowest bits.
        numbers = ((groups / scales).round().clamp(-8, 7) + 8).to(torch.int64)
        return {
            f"{owner}.weight_packed": _pack(numbers.flatten(1), range(8)),
            f"{owner}.weight_scale": scales[..., 0],
            f"{owner}.weight_shape": torch.tensor(weight.shape),
        }

    return rewrite(directory, quantize, _compressed("pack-quantized", "int", False, num_bits=4, group_size=_BLOCK))


def gptq(directory: Path) -> Path:
    """GPTQ: 4-bit integers, eight inputs of an output in 32 bits, with a scale for 32 inputs of an output."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = _four_bits(weight)
        return {
            f"{owner}.qweight": _pack(numbers.T, range(8)).T,
            # The format stores a zero point less one.
            f"{owner}.qzeros": _pack(torch.full(scales.shape, 7), range(8)),
            f"{owner}.scales": scales,
            f"{owner}.g_idx": (torch.arange(weight.shape[1]) // _BLOCK).to(torch.int32),
        }

    settings = {"quant_method": "gptq", "bits": 4, "group_size": _BLOCK, "desc_act": False, "sym": True}
    return rewrite(directory, quantize, settings)


def awq(directory: Path) -> Path:
    """AWQ: 4-bit integers, eight outputs of an input in 32 bits, in an order of their own; scales as GPTQ's."""

    def quantize(owner: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = _four_bits(weight)
        return {
            f"{owner}.qweight": _pack(numbers, _AWQ_ORDER),
            f"{owner}.qzeros": _pack(torch.full(scales.shape, 8), _AWQ_ORDER),
            f"{owner}.scales": scales,
        }

    settings = {"quant_method": "awq", "bits": 4, "group_size": _BLOCK, "zero_point": True, "version": "gemm"}
    return rewrite(directory, quantize, settings)


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers of 4 bits, of which 8 stands for zero, [inputs, outputs], and their scales, [groups, outputs]."""
    groups = weight.T.reshape(-1, _BLOCK, len(weight))
    scales = (groups.abs().amax(dim=1, keepdim=True) / 7).half()
    numbers = ((groups / scales.float()).round().clamp(-8, 7) + 8).to(torch.int64)
    return numbers.flatten(0, 1), scales[:, 0]


def _pack(numbers: Tensor, order: Sequence[int]) -> Tensor:
    """Put eight numbers of a row into 32 bits, the first of this order in the lowest ones."""
    eight = numbers.reshape(len(numbers), -1, 8)[:, :, list(order)]
    packed = (eight << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _compressed(
    name: str, kind: str, rounds_inputs: bool, *, num_bits: int = 8, group_size: int | None = None
) -> dict[str, Any]:
    weights = {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if rounds_inputs else None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def assert_served_as_by_transformers(checkpoint: Path, tie: float = 0.0) -> None:
    """P computes prompts in chunks and hands them over to D, twice: the second time they hit P's cache.

    tie: a token is right, too, if transformers' model finds it as likely as the best one, but for this much of a
        logarithm. Where inputs are rounded to 8 bits, the order in which a batch is added up may decide a rounding
    """
    config = engine_config(checkpoint, block_size=8, max_num_seqs=8, max_num_batched_tokens=24)
    prompts = {f"r{length}": random_prompt(length) for length in (1, 17, 40)}
    greedy = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    with EnginePair(config, config) as pair:
        for round_name in ("first", "again"):
            for name, prompt in prompts.items():
                pair.hand_over(f"{round_name}-{name}", prompt, greedy)
            pair.run()
            for name, prompt in prompts.items():
                _assert_right(checkpoint, prompt, pair.answers[f"{round_name}-{name}"].token_ids, tie)
        assert pair.answers["again-r40"].timings("prefill").num_cached_tokens >= 32
        pair.assert_whole()


def _assert_right(checkpoint: Path, prompt: list[int], tokens: list[int], tie: float) -> None:
    if not tie:
        assert tokens == greedy_tokens(checkpoint, tuple(prompt), _TOKENS)
        return
    assert len(tokens) == _TOKENS
    logprobs = logprobs_after(checkpoint, tuple(prompt + tokens[:-1]))[len(prompt) - 1 :]
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps = logprobs.amax(dim=1) - chosen
    assert gaps.max() <= tie, gaps
