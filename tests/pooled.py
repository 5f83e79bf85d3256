"""The vectors that we did not compute: transformers' own models, one sequence at a time, in float32."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from actors.core.requests.sampling_params import Pooling


@functools.cache
def _load(directory: Path, auto_class: Any) -> Any:  # a class that transformers chooses at run time
    return auto_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def embedding_of(
    directory: Path,
    prompt: Sequence[int],
    pooling: Pooling = "last",
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> list[float]:
    """Return the vector that the stock model's hidden states give."""
    states = _load(directory, AutoModel)(input_ids=torch.tensor([list(prompt)]), use_cache=False).last_hidden_state[0]
    vector = {"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[pooling][:dimensions]
    numbers: list[float] = (functional.normalize(vector, dim=0) if normalize else vector).tolist()
    return numbers


@torch.no_grad()
def logits_of(directory: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[num_labels], what the stock model's classification head says."""
    model = _load(directory, AutoModelForSequenceClassification)
    logits: torch.Tensor = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
    return logits


def write_pipeline(directory: Path, pooling: dict[str, Any] | None, *parts: str) -> None:
    """Write sentence-transformers' files into a checkpoint. parts: of modules.json; pooling: settings of the second."""
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{part}" if index else "", "type": f"st.models.{part}"}
        for index, part in enumerate(parts)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
