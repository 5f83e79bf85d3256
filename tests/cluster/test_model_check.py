from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.lora_config import LoraConfig
from cluster.model_check import find_adapter_mistakes, find_model_mistakes

NAME = "parallel.tensor_parallel_size"


@pytest.mark.parametrize(
    ("config", "size", "mistake"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2, None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 8, None),
        ({"num_attention_heads": 8}, 4, None),
        ({"n_head": 12}, 8, "the model's 12 attention heads cannot be shared evenly by 8 ranks"),
        ({"text_config": {"num_attention_heads": 6}}, 4, "the model's 6 attention heads cannot be shared evenly by 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "the model's 3 KV heads cannot be shared by 4"),
        ({"num_attention_heads": 6}, 1, None),
        ({"model_type": "says nothing"}, 3, None),
    ],
)
def test_heads_that_ranks_cannot_share_are_a_mistake(
    tmp_path: Path, config: dict[str, object], size: int, mistake: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model_mistakes(tmp_path, {NAME: size})
    if mistake is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{NAME} = {size}: {mistake}")


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    [mistake] = find_model_mistakes(tmp_path, {})
    assert mistake.startswith(f"model.model: {str(tmp_path)!r} is not a checkpoint")
    (tmp_path / "config.json").write_text("{")
    [mistake] = find_model_mistakes(tmp_path, {})
    assert "is not JSON" in mistake


def test_an_adapter_is_looked_at_before_any_engine_starts(tmp_path: Path) -> None:
    lora = LoraConfig(adapters={"sql": str(tmp_path), "chat": str(tmp_path / "nothing")}, max_lora_rank=8)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 9, "target_modules": ["q_proj"]}')
    high, missing = find_adapter_mistakes(lora)
    assert high == "lora.adapters.sql: its rank is 9; max_lora_rank is 8"
    assert missing.startswith("lora.adapters.chat: ")
    assert missing.endswith("nothing/adapter_config.json cannot be read: No such file or directory")
    assert find_adapter_mistakes(None) == []
