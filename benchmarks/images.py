"""Measure what images cost, and what they cost requests without any: `python -m benchmarks.images`.

One engine on the CPU with a small vision-language model, drawn at random. Told is the time that its thread has
computed: other work on the machine does not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.requests.multimodal import EncoderInput, MultiModalFeature, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from kv_transfer.config import KVTransferConfig
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from kv_transfer.trust.membership import Trust, TrustMaterial

_NUM_RUNS = 9
_GRID = (1, 32, 32)
"""Patches of an image: 448 x 448 pixels; a quarter as many tokens."""
_PATCH_VALUES = 3 * 2 * 14 * 14
_IMAGE_TOKEN = 1000
_NUM_IMAGE_TOKENS = 256
_NUM_TEXT_TOKENS = 64
_MODEL: Final[dict[str, Any]] = {
    "vision_config": {
        "depth": 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 512,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
    },
    "text_config": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "image_token_id": _IMAGE_TOKEN,
    "video_token_id": _IMAGE_TOKEN + 1,
    "vision_start_token_id": _IMAGE_TOKEN + 2,
    "vision_end_token_id": _IMAGE_TOKEN + 3,
}


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        core = _build(Path(directory))
        print(f"one image of {_NUM_IMAGE_TOKENS} tokens, {_NUM_TEXT_TOKENS} of text; median of {_NUM_RUNS}")
        print("CPU time to the first token, ms")
        _measure("text alone, as many tokens", core, _text)
        _measure("a new image", core, lambda run: _image(run, f"image-{run}", f"salt-{run}"))
        _measure("an image that is encoded already", core, lambda run: _image(100 + run, "image-0", f"other-{run}"))
        _measure("an image whose KV is cached", core, lambda run: _image(200 + run, "image-0", "one"))
        _measure_unused(core)
        core.shutdown()


def _measure(name: str, core: EngineCore, make: Callable[[int], EngineCoreRequest]) -> None:
    _time_first_token(core, make(-1))
    times_ms = [_time_first_token(core, make(run)) * 1e3 for run in range(_NUM_RUNS)]
    print(f"{name:36} {statistics.median(times_ms):8.1f}  ({min(times_ms):.1f} to {max(times_ms):.1f})")


def _measure_unused(core: EngineCore) -> None:
    """Print what a step of 32 decoding requests without images pays for a model that could see."""
    from actors.core.outputs.scheduler_output import StepBatch
    from actors.executor import InProcessExecutor

    assert isinstance(core.executor, InProcessExecutor)
    images = core.executor._worker.runner._images
    assert images is not None
    _time_first_token(core, _text(_NUM_RUNS))  # The worker forgets the last image's request with it.
    batch, num_calls = StepBatch.empty(), 100_000
    inputs = core.executor._worker.runner._batch
    began_s = time.thread_time()
    for _ in range(num_calls):
        images.put_into(inputs, batch)  # type: ignore[arg-type]  # not looked at where no request has images
    per_call_us = (time.thread_time() - began_s) / num_calls * 1e6
    print(f"a step without images, of such a model: {per_call_us:.2f} µs; of a text model: one comparison with None")


def _time_first_token(core: EngineCore, request: EngineCoreRequest) -> float:
    began_s = time.thread_time()
    core.submit(request)
    while True:
        for batch in core.step().outputs.values():
            for output in batch.outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.finished:
                    return time.thread_time() - began_s


def _text(run: int) -> EngineCoreRequest:
    num_tokens = _NUM_TEXT_TOKENS + _NUM_IMAGE_TOKENS
    return _request(f"text-{run}", [(run + 2) * 7 % 900 + index % 50 for index in range(num_tokens)], f"text-{run}")


def _image(run: int, name: str, salt: str) -> EngineCoreRequest:
    tokens = [*range(_NUM_TEXT_TOKENS // 2), *[_IMAGE_TOKEN] * _NUM_IMAGE_TOKENS, *range(_NUM_TEXT_TOKENS // 2)]
    num_patches = _GRID[1] * _GRID[2]
    pixels = torch.randn(num_patches, _PATCH_VALUES, generator=torch.Generator().manual_seed(hash(name) % 2**31))
    arrays = {
        "pixel_values": PackedArray("float32", (num_patches, _PATCH_VALUES), pixels.numpy().tobytes()),
        "image_grid_thw": PackedArray("int64", (1, 3), torch.tensor([_GRID]).numpy().tobytes()),
    }
    grid = (_GRID[0], _GRID[1] // 2, _GRID[2] // 2)
    feature = MultiModalFeature(name, _NUM_TEXT_TOKENS // 2, _NUM_IMAGE_TOKENS, _NUM_IMAGE_TOKENS, grid)
    return _request(f"image-{run}-{name}", tokens, salt, (feature,), (EncoderInput(name, arrays),))


def _request(
    request_id: str,
    tokens: list[int],
    salt: str,
    features: tuple[MultiModalFeature, ...] = (),
    inputs: tuple[EncoderInput, ...] = (),
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        cache_salt=salt,
        mm_features=features,
        encoder_inputs=inputs,
    )


def _build(directory: Path) -> EngineCore:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen2_5_vl"](**_MODEL)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    engine_config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu"),
        cache=CacheConfig(num_blocks=1024),
        scheduler=SchedulerConfig(overlap=False),
        parallel=ParallelConfig(num_threads=1),
        kv_transfer=KVTransferConfig(transport="loopback"),
    )
    address = EngineAddress("engine-0", 1, "engine-0")
    return build_engine_core(
        engine_config, address, LoopbackHub().control(address), lambda: None, trust=Trust(TrustMaterial.draw())
    )


if __name__ == "__main__":
    main()
