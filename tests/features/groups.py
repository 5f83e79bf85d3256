"""The rows of the table, by the engines that serve them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from actors.config import EngineConfig, GrammarConfig, SchedulerConfig, SpeculativeConfig
from cluster.parameters.generation import (
    ChatMessage,
    ChatPrompt,
    GenerateChunk,
    GenerateRequest,
    ImageInput,
    TokenPrompt,
)
from cluster.parameters.sampling_options import SamplingOptions
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.features.feature import CheckpointOf, Generated, Group, Setup
from tests.features.lora import ROWS as LORA_ROWS
from tests.features.lora import prepare_lora
from tests.features.prompt_embeds import PROMPT_EMBEDS, prompt_embeds_of
from tests.features.samples import SAMPLES, samples_of
from tests.features.token_rules import ROWS as TOKEN_RULES_ROWS
from tests.features.token_rules import prepare_token_rules
from tests.features.vectors import CLASSES, EMBEDDINGS, prepare_classes, prepare_embeddings
from tests.integration.promises import assert_same, engines_config, expected_answers, token_ids_of
from tests.integration.recovering_cluster import RecoveringCluster
from tests.reference import greedy_tokens, random_prompt
from tests.structured import KINDS, MAX_WHITESPACE, constrained_tokens
from tests.vision import VisionReference, draw_image, encode_png, num_encoded_by

_PROMISES: Final = {
    "greedy": "greedy sampling",
    "sampled": "seeded sampling: temperature, top-k, top-p, min-p",
    "stop string": "stop strings",
    "kept stop string": "stop strings, kept in the text",
    "held text": "text held back where a stop string may begin",
    "stop token": "stop tokens, min_tokens",
    "eos": "logit bias, end-of-sequence tokens",
    "ignored eos": "ignore_eos",
    "logprobs": "logprobs",
    "prompt logprobs": "prompt_logprobs",
    "repetition": "repetition penalty",
    "presence": "presence penalty",
    "frequency": "frequency penalty",
    "allowed tokens": "allowed_token_ids",
    "bad words": "bad_words",
    "resumed": "going on from a client's tokens",
}
_NUM_STRUCTURED_TOKENS: Final = 80
_NUM_SPECULATED_TOKENS: Final = 24
_NUM_IMAGE_TOKENS: Final = 24


def _prepare_promises(checkpoint: CheckpointOf) -> Setup:
    expected = expected_answers(checkpoint("llama"))
    features = [
        Generated(title, expected.requests[name], partial(assert_same, name, expected=expected.answers[name]))
        for name, title in _PROMISES.items()
    ]
    directory = expected.directory
    return Setup(engines_config(directory), [*features, samples_of(directory), prompt_embeds_of(directory)])


def _prepare_structured_output(checkpoint: CheckpointOf) -> Setup:
    directory = checkpoint("llama")
    features = []
    for seed, (name, params) in enumerate(KINDS.items()):
        prompt = random_prompt(20 + seed, seed=seed)
        sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_STRUCTURED_TOKENS, structured_output=params)
        request = GenerateRequest(request_id=name, prompt=TokenPrompt(prompt), sampling=sampling)
        expected = constrained_tokens(directory, prompt, params, _NUM_STRUCTURED_TOKENS)
        features.append(Generated(f"structured output: {name}", request, partial(_assert_tokens, expected)))
    return Setup(_with_grammars(_small_engines(directory)), features)


def _prepare_speculation(checkpoint: CheckpointOf, method: str) -> Setup:
    directory = checkpoint("llama")
    # The draft model is the model itself: it drafts right, as long as its cache is.
    draft = {"model": str(directory)} if method == "draft_model" else {}
    speculative = SpeculativeConfig.model_validate(
        {"method": method, "num_tokens": 3, "min_acceptance": 0.01, "prompt_lookup_min": 1, **draft}
    )
    config = _small_engines(directory)
    scheduler = config.scheduler.model_copy(update={"speculative": speculative})
    prompt = random_prompt(9) * 4
    sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_SPECULATED_TOKENS, ignore_eos=True)
    request = GenerateRequest(prompt=TokenPrompt(prompt), sampling=sampling)
    expected = greedy_tokens(directory, tuple(prompt), _NUM_SPECULATED_TOKENS)
    feature = Generated(f"speculative decoding: {method}", request, partial(_assert_tokens, expected))
    return Setup(_with_scheduler(config, scheduler), [feature], check=_assert_drafted_right)


def _prepare_token_rules(checkpoint: CheckpointOf) -> Setup:
    directory = checkpoint("llama")
    config = _with_grammars(_small_engines(directory))
    drafts = SpeculativeConfig(num_tokens=3, min_acceptance=0.01, prompt_lookup_min=1)
    return prepare_token_rules(
        _with_scheduler(config, config.scheduler.model_copy(update={"speculative": drafts})), directory
    )


def _prepare_lora(checkpoint: CheckpointOf) -> Setup:
    directory = checkpoint("llama")
    return prepare_lora(_with_grammars(_small_engines(directory)), directory)


def _prepare_images_elsewhere(checkpoint: CheckpointOf) -> Setup:
    setup = _prepare_images(checkpoint, "qwen2_5_vl", "images: encoded by an engine of its own")
    return replace(setup, encoders=("encode-0",), check=_assert_encoded_elsewhere)


def _assert_encoded_elsewhere(cluster: RecoveringCluster) -> None:
    num_encoded = cluster.engines["encode-0"].encode_service.num_encoded
    assert num_encoded == 2
    for name, engine in cluster.engines.items():
        assert name == "encode-0" or num_encoded_by(engine) == 0


def _prepare_images(checkpoint: CheckpointOf, family: str, name: str = "") -> Setup:
    directory = checkpoint(family)
    reference, images = VisionReference(directory, family), [draw_image(1), draw_image(2, 30, 50)]
    parts = ("Compare ", ImageInput(encode_png(images[0])), " with ", ImageInput(encode_png(images[1])), ".")
    shown = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    prompt = reference.prompt(reference.chat_text([{"role": "user", "content": shown}]), images)
    sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_IMAGE_TOKENS, ignore_eos=True)
    chat = ChatPrompt([ChatMessage("user", "", parts=parts)])
    expected = reference.greedy(prompt, images, _NUM_IMAGE_TOKENS)
    feature = Generated(
        name or f"images: {family}", GenerateRequest(prompt=chat, sampling=sampling), partial(_assert_tokens, expected)
    )
    # Chunks end inside images.
    return Setup(
        engine_config(directory, block_size=8, max_num_batched_tokens=32, transfer=KVTransferConfig(transport="tcp")),
        [feature],
    )


def _assert_tokens(expected: list[int], chunks: list[GenerateChunk]) -> None:
    assert token_ids_of(chunks) == expected


def _assert_drafted_right(cluster: RecoveringCluster) -> None:
    stats = [engine.stats.spec_decoding_stats for engine in cluster.engines.values()]
    assert sum(stat.num_accepted_tokens for stat in stats if stat is not None) > 0


def _small_engines(directory: Path) -> EngineConfig:
    return engine_config(directory, block_size=8, transfer=KVTransferConfig(transport="tcp"))


def _with_grammars(config: EngineConfig) -> EngineConfig:
    grammar = GrammarConfig(max_whitespace=MAX_WHITESPACE, compile_timeout_s=60.0)
    changed = {"grammar": grammar, "grammar_timeout_s": 60.0}
    return _with_scheduler(config, config.scheduler.model_copy(update=changed))


def _with_scheduler(config: EngineConfig, scheduler: SchedulerConfig) -> EngineConfig:
    return config.model_copy(update={"scheduler": scheduler})


GROUPS: Final = (
    Group("sampling", (*_PROMISES.values(), SAMPLES, PROMPT_EMBEDS), _prepare_promises),
    Group("token rules", TOKEN_RULES_ROWS, _prepare_token_rules),
    Group("lora", LORA_ROWS, _prepare_lora),
    Group("structured output", tuple(f"structured output: {name}" for name in KINDS), _prepare_structured_output),
    *(
        Group(method, (f"speculative decoding: {method}",), partial(_prepare_speculation, method=method))
        for method in ("ngram", "draft_model")
    ),
    Group("embeddings", tuple(EMBEDDINGS.values()), prepare_embeddings),
    Group("classes", (CLASSES,), prepare_classes),
    *(
        Group(family, (f"images: {family}",), partial(_prepare_images, family=family))
        for family in ("llava", "qwen2_5_vl")
    ),
    Group("encoders", ("images: encoded by an engine of its own",), _prepare_images_elsewhere),
)
