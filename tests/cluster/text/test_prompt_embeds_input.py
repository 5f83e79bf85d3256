"""The embeddings that an API lets in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.api.grpc.conversions.generate import request_from_proto
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.errors import InvalidRequest
from cluster.parameters.generation import EmbedsPrompt, GenerateRequest
from cluster.parameters.sampling_options import SamplingOptions
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import MAX_BYTES_ON_EVENT_LOOP, InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.text.prompt_embeds_input import _TOO_LARGE, read_embeds
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

WIDTH = 3
MODEL = ModelDescription("tiny", 32, VOCAB_SIZE, (EOS_TOKEN_ID,), prompt_embeds_size=WIDTH)
VALUES = np.arange(6, dtype="<f4").reshape(2, WIDTH)
PROMPT = EmbedsPrompt(VALUES.tobytes(), num_tokens=2, hidden_size=WIDTH, dtype="float32")


def processor(model: ModelDescription = MODEL, limits: InputLimits | None = None) -> InputProcessor:
    return InputProcessor(model, ModelTokenizer(byte_tokenizer(), use_fastokens=True), limits)


def with_value(prompt: EmbedsPrompt, item: bytes, place: int) -> EmbedsPrompt:
    data = bytearray(prompt.data)
    data[place * len(item) : (place + 1) * len(item)] = item
    return replace(prompt, data=bytes(data))


async def test_embeddings_reach_the_engine_with_a_digest() -> None:
    request = await processor().process(GenerateRequest(prompt=PROMPT))
    assert request.prompt_token_ids == [0, 0]
    embeds = request.prompt_embeds
    assert embeds is not None
    assert (embeds.data, embeds.num_tokens, embeds.hidden_size, embeds.dtype) == (PROMPT.data, 2, WIDTH, "float32")
    digests = {
        read_embeds(prompt).digest
        for prompt in (PROMPT, with_value(PROMPT, b"\0\0\0\1", 5), replace(PROMPT, dtype="bfloat16", hidden_size=6))
    }
    assert len(digests) == 3
    assert read_embeds(PROMPT).digest == embeds.digest


async def test_many_embeddings_are_read_beside_the_event_loop() -> None:
    model = replace(MODEL, max_model_len=100_000)
    num_tokens = MAX_BYTES_ON_EVENT_LOOP // 4
    prompt = EmbedsPrompt(bytes(num_tokens * WIDTH * 4), num_tokens, WIDTH, "float32")
    request = await processor(model).process(GenerateRequest(prompt=prompt))
    assert request.prompt_embeds is not None
    assert request.prompt_embeds.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (replace(PROMPT, hidden_size=2, num_tokens=3), "hidden_size is 2; allowed: the model's, which is 3"),
        (replace(PROMPT, num_tokens=0, data=b""), "num_tokens is 0; allowed: at least 1"),
        (replace(PROMPT, num_tokens=3), "data is 24 bytes long; allowed: 36 bytes: num_tokens x hidden_size"),
        (replace(PROMPT, dtype="float16"), "dtype is 'float16'; allowed: float32 or bfloat16"),
        (replace(PROMPT, num_tokens=9, data=bytes(108)), "data is 108 bytes long; allowed: at most 100 bytes"),
        (
            with_value(PROMPT, np.float32(np.nan).tobytes(), 4),
            "data is NaN, infinite or too large in row 1; allowed: numbers",
        ),
        (with_value(PROMPT, np.float32(-np.inf).tobytes(), 0), "data is NaN, infinite or too large in row 0"),
        (
            with_value(EmbedsPrompt(bytes(12), 2, WIDTH, "bfloat16"), b"\xc0\x7f", 3),
            "data is NaN, infinite or too large in row 1",
        ),
    ],
)
async def test_what_the_model_could_not_use_is_refused(prompt: EmbedsPrompt, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await processor(limits=InputLimits(max_prompt_embeds_bytes=100)).process(GenerateRequest(prompt=prompt))
    assert f"prompt_embeds.{said}" in str(raised.value)


async def test_a_model_without_a_look_up_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="this model takes no embeddings"):
        await processor(replace(MODEL, prompt_embeds_size=0)).process(GenerateRequest(prompt=PROMPT))


async def test_what_has_no_tokens_has_no_log_probabilities() -> None:
    asked = GenerateRequest(prompt=PROMPT, sampling=SamplingOptions(prompt_logprobs=0))
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 0; allowed: none: the prompt has no tokens"):
        await processor().process(asked)


async def test_they_cannot_be_tokenized_for_other_uses() -> None:
    with pytest.raises(InvalidRequest, match="embeddings have no tokens"):
        await processor().tokenize(PROMPT)


async def test_a_prompt_too_long_for_the_context_is_refused() -> None:
    prompt = EmbedsPrompt(bytes(32 * WIDTH * 2), 32, WIDTH, "bfloat16")
    with pytest.raises(InvalidRequest, match="prompt_embeds is 32 tokens long"):
        await processor().process(GenerateRequest(prompt=prompt))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (generate_pb2.EMBEDS_DTYPE_FLOAT32, "float32"),
        (generate_pb2.EMBEDS_DTYPE_BFLOAT16, "bfloat16"),
        (generate_pb2.EMBEDS_DTYPE_UNSPECIFIED, "unspecified"),
    ],
)
async def test_embeddings_are_read(dtype: generate_pb2.EmbedsDtype, expected: str) -> None:
    embeds = generate_pb2.PromptEmbeds(data=b"abcd", num_tokens=1, hidden_size=2, dtype=dtype)
    request = await request_from_proto("a", generate_pb2.GenerateRequest(prompt_embeds=embeds), None)
    assert request.prompt == EmbedsPrompt(b"abcd", 1, 2, expected)


@pytest.mark.parametrize(
    ("dtype", "largest", "too_large"),
    [("float32", 3.4028234e38, np.inf), ("bfloat16", 3.3961e38, 3.3962e38), ("float16", 65_519.0, 65_520.0)],
)
async def test_what_would_be_infinite_in_the_models_dtype_is_refused(
    dtype: str, largest: float, too_large: float
) -> None:
    model = replace(MODEL, dtype=dtype)
    for sign in (1, -1):
        finite = with_value(PROMPT, np.float32(sign * largest).tobytes(), 4)
        assert (await processor(model).process(GenerateRequest(prompt=finite))).prompt_embeds is not None
        infinite = with_value(PROMPT, np.float32(sign * too_large).tobytes(), 4)
        with pytest.raises(InvalidRequest, match=f"too large in row 1; allowed: .* which is {dtype}"):
            await processor(model).process(GenerateRequest(prompt=infinite))


async def test_numbers_of_bfloat16_may_be_too_large_for_float16() -> None:
    prompt = with_value(EmbedsPrompt(bytes(12), 2, WIDTH, "bfloat16"), b"\x80\x47", 3)  # 65536.0
    await processor(replace(MODEL, dtype="bfloat16")).process(GenerateRequest(prompt=prompt))
    with pytest.raises(InvalidRequest, match="too large in row 1"):
        await processor(replace(MODEL, dtype="float16")).process(GenerateRequest(prompt=prompt))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bounds_are_those_of_the_cast(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bound = np.float32(_TOO_LARGE[dtype])
    below = np.nextafter(bound, np.float32(0))
    cast = torch.tensor([float(bound), float(below)], dtype=torch.float32).to(getattr(torch, dtype))
    assert torch.isfinite(cast).tolist() == [False, True]
