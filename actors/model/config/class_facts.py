"""Facts of transformers' model classes, by model type, for processes that cannot load torch to look at the classes.

tests/actors/model/config/test_class_facts.py compares the tables with the classes of the installed transformers.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WITHOUT_ATTENTION_INTERFACE: Final = _words(
    """
    bailing_hybrid bamba bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt codegen
    cpmant falcon falcon_h1 falcon_mamba git gpt_neo gpt_neox_japanese gptj inkling2_text inkling_text jamba
    kimi_linear mamba mamba2 marian mbart megatron-bert mpt musicgen musicgen_melody mvp nemotron_h olmo_hybrid
    openai-gpt pegasus plbart prophetnet qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
    qwen4_exp_text reformer rembert roformer rwkv stablelm trocr whisper xglm xlm xlnet xlstm zamba zamba2
    """
)
"""Causal language models whose attention cannot be replaced: no _supports_attention_backend."""

WITH_RECURRENT_STATE: Final = _words(
    """
    bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2
    nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
    recurrent_gemma rwkv xlstm zamba zamba2 zaya
    """
)
"""Causal language models whose class is _is_stateful; granitemoehybrid keeps a state in some checkpoints only."""

RECURRENT_MODULES: Final = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba2": "Zamba2MambaMixer",
}
"""The causal language models whose recurrent states are served, with the class of their recurrent modules."""

WITHOUT_ATTENTION: Final = _words("mamba2")
"""The ones among them that never attend."""

WITH_BATCH_DELIVERED: Final = _words(
    "bamba falcon falcon_h1 nemotron nemotron_h qwen3_5_moe_text qwen3_5_text qwen3_next stablelm zamba2"
)
"""Causal language models whose attention modules get the step's batch in another way than by the model's own code."""

WITH_REPLACED_ATTENTION: Final = _words("falcon")
"""The ones among them whose attention does not run through transformers' AttentionInterface: raypd has its own."""

WITH_LATENT_ATTENTION: Final = _words("deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu")
"""The causal language models with latent attention (MLA) that are served.

Their attention modules make keys and values of latents in a method, expand_kv(), and attend to all tokens so far.
"""

WITH_WINDOW_IN_MASK: Final = _words("moshi phimoe qwen2_moe")
"""Causal language models that apply their sliding window in a mask only, and do not pass the window to attention."""

WITH_CHUNKED_ATTENTION: Final = _words("llama4_text")
"""Causal language models whose chunked_attention layers raypd serves: a token attends within its chunk only."""

WITH_POSITIONS_BY_CACHE: Final = _words("llama4_text")
"""Causal language models whose attention counts a token's position by the length of transformers' cache."""

BIDIRECTIONAL_UNLESS_DECODER: Final = _words(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """
)
"""Encoders whose language model is causal only where the config says is_decoder."""

WITH_POSITIONS_AFTER_PADDING: Final = _words(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
)
"""Causal language models that number positions from the one after the padding token."""

ACTIVATIONS: Final = _words(
    """
    gelu gelu_10 gelu_fast gelu_new gelu_python gelu_pytorch_tanh gelu_python_tanh gelu_accurate hardswish
    laplace leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh prelu xielu
    """
)
"""The keys of transformers.activations.ACT2FN."""

REFUSED_ON_TRIAL: Final = {
    "diffllama": "it attends more than once in a layer",
    "doge": "its attention has a mask of its own",
    "hrm_text": "its attention has a mask of its own",
}
"""Models that an engine refuses when it runs them, whatever their weights."""

QUANTIZATION_PACKAGES: Final = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "bitsandbytes_4bit": ("bitsandbytes", "accelerate"),
    "bitsandbytes_8bit": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels",),
    "fp8": ("accelerate",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute",),
    "hqq": ("hqq",),
    "mxfp8": ("accelerate",),
    "quanto": ("optimum",),
    "quark": ("quark",),
    "spqr": ("spqr_quant",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
"""The modules that transformers imports to read checkpoints, by quantization method."""

IN_EXTRA_QUANTIZED: Final = _words("accelerate bitsandbytes compressed_tensors torchao")
"""The ones among them that come with the extra raypd[quantized], and are tested."""
