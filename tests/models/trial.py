"""Tries to serve model types, one after the other: `python -m tests.models.trial llama mamba`

Each gets a small checkpoint with seeded weights, which raypd's own loader reads. A model that is not refused has to
give generate()'s tokens in everything that ABILITIES names. Prints one line of JSON for each model type.
"""

from __future__ import annotations

import collections
import functools
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from actors.config import ModelConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.model import loaded_runner
from actors.model.cache.kv_cache import make_layout
from actors.model.config.config_rules import reason_in_config
from actors.model.config.text_parts import SERVED_AS_TEXT, as_text_part
from actors.model.errors import UnsupportedModel
from actors.model.forward import FlatForward
from actors.model.loader import LoadedModel, load_model
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import PrefixSource
from tests.actors.model.ranks import on_each_rank
from tests.checkpoints import write_checkpoint
from tests.engine_pair import EnginePair, engine_config
from tests.models.tiny_configs import tiny_config
from tests.multimodal import MultimodalClass
from tests.reference import greedy_tokens, random_prompt

OUTCOME: Final = "outcome of a trial: "
"""A line of a child's output that begins so holds an Outcome."""
_BLOCK_SIZE: Final = 8
_LENGTHS: Final = (1, 17, 56)
_MAX_PARAMETERS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial.

    abilities: what it was served with; empty if it is refused
    reason:    why it is refused
    fault:     set if it is neither served right nor refused
    """

    model_type: str
    abilities: tuple[str, ...] = ()
    reason: str = ""
    fault: str = ""


def try_model_type(model_type: str, directory: Path) -> Outcome:
    """Try a model type, with files in this directory, which is made."""
    config = tiny_config(model_type)
    if (reason := reason_in_config(as_text_part(config))) is not None:
        return Outcome(model_type, reason=reason)
    auto_class: Any = MultimodalClass if model_type in SERVED_AS_TEXT else AutoModelForCausalLM
    _assert_small(config, auto_class)
    config.save_pretrained(directory / "config")
    settings = ModelConfig(model=str(directory / "config"), load_format="dummy", dtype="float32", device="cpu")
    try:
        load_model(settings)
        # The class that is saved may have another config than the one that was tried.
        checkpoint = write_checkpoint(tiny_config(model_type), directory / "checkpoint", auto_class=auto_class)
        load_model(ModelConfig(model=str(checkpoint), dtype="float32", device="cpu"))
    except UnsupportedModel as refusal:
        return Outcome(model_type, reason=refusal.reason)
    return Outcome(model_type, tuple(name for check, _ in _CHECKS for name in check(checkpoint)))


def _assert_small(config: PretrainedConfig, auto_class: Any) -> None:
    with torch.device("meta"):
        model = auto_class.from_config(config)
    num_parameters = model.num_parameters()
    assert num_parameters <= _MAX_PARAMETERS, f"its tiny config has {num_parameters} parameters"


def _num_state_blocks(checkpoint: Path) -> int:
    """How many blocks a request's recurrent state takes; 0 for a model without."""
    model: LoadedModel = getattr(loaded_runner, "load_model")(  # noqa: B009
        ModelConfig(model=str(checkpoint), dtype="float32", device="cpu")
    )
    layout = make_layout(
        model.geometry, num_blocks=1, block_size=_BLOCK_SIZE, dtype=torch.float32, model_fingerprint=""
    )
    return layout.num_state_blocks


def _hand_over(checkpoint: Path) -> tuple[str, ...]:
    """P computes prompts in chunks and hands them over to D; then the same prompts hit P's cache."""
    num_state_blocks = _num_state_blocks(checkpoint)
    config = engine_config(
        checkpoint,
        block_size=_BLOCK_SIZE,
        num_blocks=256 + 8 * num_state_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=24,
    )
    prompts = {f"r{length}": random_prompt(length) for length in _LENGTHS}
    with EnginePair(config, config) as pair:
        for round_name in ("first", "again"):
            for name, prompt in prompts.items():
                pair.hand_over(f"{round_name}-{name}", prompt, _greedy(8))
            pair.run()
            for name, prompt in prompts.items():
                _assert_right(pair, f"{round_name}-{name}", checkpoint, prompt, 8)
        num_cached_tokens = pair.answers["again-r56"].timings("prefill").num_cached_tokens
        assert num_cached_tokens >= 48
        pair.assert_whole()
    return _HANDED_OVER


def _preempt(checkpoint: Path) -> tuple[str, ...]:
    """D launches steps early, and its pool is too small for the outputs of two requests."""
    num_state_blocks = _num_state_blocks(checkpoint)
    prefill = engine_config(checkpoint, block_size=_BLOCK_SIZE, num_blocks=256 + 4 * num_state_blocks, overlap=True)
    decode = engine_config(checkpoint, block_size=_BLOCK_SIZE, num_blocks=17 + 2 * num_state_blocks, overlap=True)
    prompts = {f"r{index}": random_prompt(26 + index, seed=index) for index in range(4)}
    with EnginePair(prefill, decode) as pair:
        for name, prompt in prompts.items():
            pair.hand_over(name, prompt, _greedy(40))
        pair.run()
        for name, prompt in prompts.items():
            _assert_right(pair, name, checkpoint, prompt, 40)
        assert pair.engines["decode"].make_stats().num_preemptions > 0
        pair.assert_whole()
    return _PREEMPTED


def _split(checkpoint: Path) -> tuple[str, ...]:
    """Two ranks load the model, and rank 0 compares what they compute with the whole model."""
    config = ModelConfig(model=str(checkpoint), dtype="float32", device="cpu")
    try:
        on_each_rank(2, lambda group: load_model(config, group))
    except UnsupportedModel:
        return ()
    return _SPLIT


def _take_over(checkpoint: Path) -> tuple[str, ...]:
    """P goes on with what D has computed: a prefix, an output without its KV, and an output with its KV."""
    transfer = KVTransferConfig(transport="loopback", prefix_load_timeout_s=60.0)
    num_state_blocks = _num_state_blocks(checkpoint)
    # Three requests keep a state and a snapshot each, and of an engine's blocks half are sent at once, at most.
    num_blocks = 256 + 8 * num_state_blocks
    config = engine_config(checkpoint, block_size=_BLOCK_SIZE, num_blocks=num_blocks, transfer=transfer)
    prompts = {name: random_prompt(40, seed=seed) for seed, name in enumerate(("fetched", "resumed", "moved"))}
    with EnginePair(config, config) as pair:
        for name, prompt in prompts.items():
            pair.submit("decode", f"first-{name}", prompt, _greedy(16))
        pair.run()
        # A state is fetched from where one is kept: after the last full block that leaves a token of the prompt.
        source = PrefixSource(pair.addresses["decode"], 32 if num_state_blocks else 1000)
        for name, prompt in prompts.items():
            known = [] if name == "fetched" else pair.answers[f"first-{name}"].token_ids[:5]
            fetched_from = None if name == "resumed" else source
            pair.submit("prefill", name, prompt, _greedy(16), fetched_from, output_token_ids=known)
        pair.run()
        for name, prompt in prompts.items():
            _assert_right(pair, name, checkpoint, prompt, 16)
        # One token of a prompt is left to compute: 4 blocks of 40 tokens are fetched, and 5 of 45.
        num_loaded = pair.engines["prefill"].make_stats().prefix_cache_stats.loaded
        assert num_loaded == (8 if num_state_blocks else 9) * _BLOCK_SIZE
        pair.assert_whole()
    return _TAKEN_OVER


_HANDED_OVER: Final = ("handoff with chunks", "prefix hits")
_PREEMPTED: Final = ("preemption", "overlap")
_SPLIT: Final = ("two ranks",)
_TAKEN_OVER: Final = ("fetched prefix", "moved", "resumed after a crash")
_CHECKS: Final[tuple[tuple[Callable[[Path], tuple[str, ...]], tuple[str, ...]], ...]] = (
    (_hand_over, _HANDED_OVER),
    (_preempt, _PREEMPTED),
    (_split, _SPLIT),
    (_take_over, _TAKEN_OVER),
)
"""Each check, with the abilities that it can find; it returns those that the model is served with."""
ABILITIES: Final = tuple(name for _, names in _CHECKS for name in names)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _assert_right(pair: EnginePair, name: str, checkpoint: Path, prompt: list[int], num_tokens: int) -> None:
    expected = greedy_tokens(checkpoint, tuple(prompt), num_tokens)
    assert pair.answers[name].token_ids == expected, f"{name}: {pair.answers[name].token_ids} instead of {expected}"


def _take_turns() -> None:
    """Let a model compute one forward at a time, whatever threads its engines step on."""
    forward, turns = FlatForward.__call__, collections.defaultdict[int, threading.Lock](threading.Lock)

    def compute(self: FlatForward, *inputs: Any, **arguments: Any) -> Tensor:
        with turns[id(self)]:
            return forward(self, *inputs, **arguments)

    setattr(FlatForward, "__call__", compute)  # noqa: B010


def main(model_types: list[str]) -> None:
    """Try the model types, and print their outcomes."""
    torch.set_num_threads(1)
    _take_turns()
    for model_type in model_types:
        # The engines of a trial share its model.
        setattr(loaded_runner, "load_model", functools.cache(load_model))  # noqa: B010
        with tempfile.TemporaryDirectory() as directory:
            try:
                outcome = try_model_type(model_type, Path(directory))
            except Exception as error:
                traceback.print_exc()
                outcome = Outcome(model_type, fault=f"{type(error).__name__}: {error}")
        sys.stdout.write(f"{OUTCOME}{json.dumps(asdict(outcome))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
