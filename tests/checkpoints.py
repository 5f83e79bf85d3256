"""Small seeded checkpoints in Hugging Face format: config, safetensors, generation config and a BPE tokenizer.

The weights are drawn so that greedy decoding has clear margins and does not fall into a loop at once: at the libraries'
own initialisation (std 0.02) a random model's logits are nearly flat, and a rounding error could flip its argmax.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.recurrent_configs import RECURRENT_CONFIGS

VOCAB_SIZE = 384
EOS_TOKEN = "<|endoftext|>"
EOS_TOKEN_ID = 0
MAX_POSITIONS = 512
SLIDING_WINDOW = 12
"""The window of the families that have one: shorter than the prompts of the tests."""

_SPECIAL_TOKENS = [EOS_TOKEN, "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = """
A serving engine reads prompts and builds a cache of keys and values; another engine takes the cache and generates.
The blocks of the cache travel between the two, chunk by chunk, while the next chunk is being computed.
Whoever asks gets tokens in order, each exactly once, whatever happens to the machines in between.
def schedule(self): return the requests that compute tokens in this step, the running ones before the waiting ones.
Ein Satz mit Umlauten: Öl, Äpfel, Übung, Straße. Une phrase accentuée: déjà vu, garçon, où, forêt. 日本語の文章。 🙂🚀
"""

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}
_FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", _LLAMA_LIKE | {"head_dim": 16}),
    "mistral": ("mistral", _LLAMA_LIKE | {"head_dim": 16, "sliding_window": SLIDING_WINDOW}),
    "gemma2": (
        "gemma2",
        _LLAMA_LIKE
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _LLAMA_LIKE
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", _LLAMA_LIKE),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
            "tie_word_embeddings": False,
            "bos_token_id": EOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
        },
    ),
    "opt": (
        "opt",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": False,
            "bos_token_id": EOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
            "pad_token_id": EOS_TOKEN_ID,
        },
    ),
    "mixtral": ("mixtral", _LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        _LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILY_CONFIGS)

_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_GRANITE: dict[str, Any] = _LLAMA_LIKE | {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.8,
    "logits_scaling": 0.5,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PER_LAYER_INPUTS: dict[str, Any] = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
_FURTHER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt_oss",
        _LLAMA_LIKE
        | _EXPERTS
        | {
            "head_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite_swa": ("granite_swa", _GRANITE | {"sliding_window": SLIDING_WINDOW}),
    "granitemoe_swa": ("granitemoe_swa", _GRANITE | _EXPERTS | {"sliding_window": SLIDING_WINDOW}),
    "granitemoehybrid": (
        "granitemoehybrid",
        _GRANITE
        | _EXPERTS
        | {
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
        },
    ),
    "nemotron": ("nemotron", _LLAMA_LIKE),
    "stablelm": ("stablelm", _LLAMA_LIKE | {"hidden_size": 64, "use_qkv_bias": True, "qk_layernorm": True}),
    "falcon": ("falcon", _FALCON),
    "falcon_40b": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_mha": ("falcon", _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    # Layers with heads of 8 and of 16, 2 and 1 KV heads; the last two read the KV of the second and the first.
    "gemma4": (
        "gemma4_text",
        _LLAMA_LIKE
        | _PER_LAYER_INPUTS
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": SLIDING_WINDOW,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        _LLAMA_LIKE
        | _PER_LAYER_INPUTS
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": SLIDING_WINDOW,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 8,
        },
    ),
    # K is wider than V, and layers with a window have twice the KV heads, and sinks.
    "mimo": (
        "mimo_v2_flash",
        _LLAMA_LIKE
        | {
            "head_dim": 16,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": SLIDING_WINDOW,
        },
    ),
    # Layers that attend within chunks of 16 tokens, and one that scales queries by their position.
    "llama4": (
        "llama4_text",
        _LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 16,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
}

FURTHER_FAMILIES: tuple[str, ...] = tuple(_FURTHER_CONFIGS)
"""The families of which `make test` serves samples, and `make test-more` all."""

_LATENT: dict[str, Any] = _LLAMA_LIKE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
"""Latent attention whose sizes all differ, so that a mistaken one shows."""
_LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", _LATENT | _LATENT_EXPERTS | {"topk_method": "group_limited_greedy"}),
    # As DeepSeek-V2-Lite: queries are not compressed. Values are longer than keys.
    "deepseek_v2_lite": (
        "deepseek_v2",
        _LATENT | _LATENT_EXPERTS | {"q_lora_rank": None, "n_group": None, "topk_group": None, "v_head_dim": 28},
    ),
    "deepseek_v3": ("deepseek_v3", _LATENT | _LATENT_EXPERTS | {"first_k_dense_replace": 1}),
    # As Kimi K2: one group of experts.
    "kimi_k2": ("deepseek_v3", _LATENT | _LATENT_EXPERTS | {"first_k_dense_replace": 1, "n_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | _LATENT_EXPERTS | {"n_group": 1}),
    "longcat_flash": (
        "longcat_flash",
        {field: value for field, value in _LATENT.items() if field not in ("num_hidden_layers", "intermediate_size")}
        | {
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "minicpm3": ("minicpm3", _LATENT),
    "youtu": ("youtu", _LATENT),
}

RECURRENT_FAMILIES: tuple[str, ...] = tuple(RECURRENT_CONFIGS)
"""The families with recurrent states; their fields are in tests/recurrent_configs.py."""

LATENT_FAMILIES: tuple[str, ...] = tuple(_LATENT_CONFIGS)
"""The families with latent attention: `make test` serves most once, `make test-slow` all in every combination."""

_BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": EOS_TOKEN_ID,
}
_ENCODER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT_LIKE),
    "xlm-roberta": ("xlm-roberta", _BERT_LIKE | {"pad_token_id": 1, "max_position_embeddings": 66}),
}

_CONFIGS = (
    _FAMILY_CONFIGS
    | _FURTHER_CONFIGS
    | _LATENT_CONFIGS
    | _ENCODER_CONFIGS
    | {name: (model_type, _LLAMA_LIKE | fields) for name, (model_type, fields) in RECURRENT_CONFIGS.items()}
)


def make_checkpoint(
    family: str, directory: Path, *, seed: int = 0, auto_class: Any = AutoModelForCausalLM, **config_overrides: Any
) -> Path:
    """Write a small float32 checkpoint of a family into a directory (made if missing) and return the directory.

    auto_class: transformers' class for another kind of model
    config_overrides are fields of the family's transformers config, such as num_hidden_layers or sliding_window.
    """
    return write_checkpoint(family_config(family, **config_overrides), directory, seed=seed, auto_class=auto_class)


def family_config(family: str, **config_overrides: Any) -> PretrainedConfig:
    """The config of a family's small checkpoint."""
    model_type, settings = _CONFIGS[family]
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**(settings | config_overrides))
    return config


def write_checkpoint(
    config: PretrainedConfig, directory: Path, *, seed: int = 0, auto_class: Any = AutoModelForCausalLM
) -> Path:
    """Write a float32 checkpoint of a config into a directory (made if missing) and return the directory."""
    model = auto_class.from_config(config, dtype=torch.float32)
    draw_weights(model, torch.Generator().manual_seed(seed))
    if auto_class is AutoModelForCausalLM:
        model.generation_config.eos_token_id = EOS_TOKEN_ID
        model.generation_config.pad_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=train_tokenizer(), eos_token=EOS_TOKEN, pad_token=EOS_TOKEN, chat_template=_CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Matrices keep the variance of what they read, so that every layer and the whole context weigh in the logits."""
    is_gemma = model.config.model_type.startswith("gemma")  # multiplies its embeddings by sqrt(hidden_size)
    token_embedding_std = 0.15 if is_gemma else 1.0
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name or "wte" in name or "wpe" in name:
            parameter.copy_(noise * (0.3 if "position" in name or "wpe" in name else token_embedding_std))
        elif name.endswith("sinks"):
            parameter.copy_(noise)
        elif parameter.ndim == 3 and "conv" in name:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        elif parameter.ndim >= 2:
            parameter.copy_(noise * 1.5 / math.sqrt(min(parameter.shape[-2:])))
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.1)
        else:
            parameter.add_(noise * 0.1)


@functools.cache
def train_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text is representable, and characters of several bytes can be split between tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    return tokenizer
