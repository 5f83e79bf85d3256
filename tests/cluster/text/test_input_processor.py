"""Tests of cluster/parameters/generation.py, cluster/parameters/sampling_rules.py, cluster/settings/input_limits.py,
cluster/text/model_description.py, cluster/text/request_rules.py.
"""

import math
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from actors.checkpoint.generation_defaults import GenerationDefaults
from actors.core.requests.sampling_params import SamplingParams
from cluster.access.aims import Aims
from cluster.errors import InvalidRequest, ModelNotFound
from cluster.parameters.generation import ChatMessage, ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import SamplingOptions
from cluster.settings.input_limits import InputLimits
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from cluster.text.tokenizing import MAX_CHARS_ON_EVENT_LOOP
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

MODEL = ModelDescription("tiny", max_model_len=32, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
SMALL_LIMITS = InputLimits(
    default_max_tokens=20,
    max_prompt_chars=100,
    max_stop_strings=2,
    max_stop_string_chars=4,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_allowed_token_ids=3,
    max_bad_words=2,
    max_bad_word_chars=4,
)


def _template(messages: list[dict[str, JSON]], variables: dict[str, JSON]) -> str:
    del variables
    if messages[0]["role"] == "system":
        raise ValueError("no system messages here")
    return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"


def _processor(model: ModelDescription = MODEL, limits: InputLimits = SMALL_LIMITS) -> InputProcessor:
    return InputProcessor(
        model, ModelTokenizer(byte_tokenizer(), _template, use_fastokens=True), limits, clock=lambda: 1000.0
    )


async def test_a_request_with_nothing_but_a_prompt_gets_the_defaults() -> None:
    request = await _processor().process(GenerateRequest(prompt=TextPrompt("hello"), request_id="mine"))

    assert request.request_id.startswith("mine-")
    assert request.prompt_token_ids == list(b"hello")
    assert request.sampling_params == SamplingParams(max_tokens=20, seed=request.sampling_params.seed)
    assert request.eos_token_ids == (EOS_TOKEN_ID,)
    assert (request.arrival_time_s, request.deadline_s, request.cache_salt) == (1000.0, None, None)


async def test_everything_that_is_asked_for_reaches_the_engine() -> None:
    sampling = SamplingOptions(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        seed=11,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        logit_bias={7: -2.0},
        allowed_token_ids=(7, 97),
        bad_words=("ab", " c"),
    )
    asked = GenerateRequest(
        prompt=TokenPrompt([1, 2]),
        model="tiny",
        sampling=sampling,
        priority=-3,
        output_token_ids=(8, 9),
        cache_salt="tenant",
        timeout_s=2.5,
    )

    request = await _processor().process(asked)

    assert request.sampling_params == SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        seed=11,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        logit_bias={7: -2.0},
        allowed_token_ids=(7, 97),
        bad_words=((97, 98), (99,)),
    )
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2], [8, 9])
    assert (request.priority, request.cache_salt, request.deadline_s) == (-3, "tenant", 1002.5)


async def test_two_requests_without_a_seed_draw_different_ones() -> None:
    requests = [await _processor().process(GenerateRequest(prompt=TextPrompt("x"))) for _ in range(2)]

    assert requests[0].sampling_params.seed != requests[1].sampling_params.seed


async def test_a_conversation_goes_through_the_chat_template() -> None:
    request = await _processor().process(GenerateRequest(prompt=ChatPrompt([ChatMessage("user", "hi")])))

    assert bytes(request.prompt_token_ids) == b"[user]hi[assistant]"


async def test_max_tokens_defaults_to_the_room_that_is_left() -> None:
    request = await _processor().process(GenerateRequest(prompt=TextPrompt("x" * 30)))

    assert request.sampling_params.max_tokens == 2


async def test_a_very_small_temperature_is_greedy_and_a_top_k_of_minus_one_is_all() -> None:
    options = SamplingOptions(temperature=1e-6, top_k=-1)

    request = await _processor().process(GenerateRequest(prompt=TextPrompt("x"), sampling=options))

    assert (request.sampling_params.temperature, request.sampling_params.top_k) == (0.0, 0)


async def test_a_long_prompt_is_tokenized_all_the_same() -> None:
    text = "long " * MAX_CHARS_ON_EVENT_LOOP
    processor = _processor(replace(MODEL, max_model_len=len(text) + 1), InputLimits())

    request = await processor.process(GenerateRequest(prompt=TextPrompt(text)))

    assert bytes(request.prompt_token_ids).decode() == text


@pytest.mark.parametrize(
    ("prompt", "field", "said"),
    [
        (None, "prompt", "one of text, token_ids, chat and prompt_embeds"),
        (TextPrompt(""), "text", "at least one character"),
        (TextPrompt("x" * 32), "text", "32 tokens long; allowed: fewer than the context's 32"),
        (TextPrompt("x" * 101), "text", "101 characters long; allowed: at most 100"),
        (TokenPrompt([]), "token_ids", "at least one token id"),
        (TokenPrompt([1] * 32), "token_ids", "32 tokens long"),
        (TokenPrompt([1, VOCAB_SIZE]), "token_ids", "token ids from 0 to 256"),
        (ChatPrompt([]), "chat", "1 to 10000 messages"),
        (ChatPrompt([ChatMessage("user", "x" * 101)]), "chat", "at most 100 characters"),
        (ChatPrompt([ChatMessage("system", "be nice")]), "chat", "refuses these messages: no system messages here"),
    ],
)
async def test_a_bad_prompt_is_refused(prompt: Prompt | None, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await _processor().process(GenerateRequest(prompt=prompt))

    [violation] = raised.value.violations
    assert violation.field == field
    assert said in str(violation)


async def test_tools_and_further_fields_count_as_characters_of_a_conversation() -> None:
    messages = [ChatMessage("user", "hi", {"name": "x" * 60})]
    for chat in (
        ChatPrompt(messages, ["x" * 40]),
        ChatPrompt(messages, variables={"mood": "x" * 40}),
    ):
        with pytest.raises(InvalidRequest, match="chat is"):
            await _processor().process(GenerateRequest(prompt=chat))


async def test_a_prompt_can_be_tokenized_that_has_no_room_in_the_context() -> None:
    assert await _processor().tokenize(TextPrompt("x" * 100)) == [120] * 100
    with pytest.raises(InvalidRequest, match="text is 101 characters long"):
        await _processor().tokenize(TextPrompt("x" * 101))


async def test_text_whose_tokens_the_model_does_not_have_is_refused() -> None:
    processor = InputProcessor(
        replace(MODEL, vocab_size=ord("y")), ModelTokenizer(byte_tokenizer(), use_fastokens=True)
    )

    await processor.process(GenerateRequest(prompt=TextPrompt("xx")))
    with pytest.raises(InvalidRequest, match=r"text is \[120, 121\]; allowed: token ids from 0 to 120"):
        await processor.process(GenerateRequest(prompt=TextPrompt("xy")))


async def test_tokens_that_only_a_tokenizers_template_knows_are_found_too() -> None:
    backend = byte_tokenizer()
    special_tokens = [("<other>", VOCAB_SIZE)]
    backend.post_processor = TemplateProcessing(single="<other> $A", special_tokens=special_tokens)

    with pytest.raises(InvalidRequest, match=rf"text is \[{VOCAB_SIZE}, 120\]; allowed: token ids from 0 to"):
        await InputProcessor(MODEL, ModelTokenizer(backend, use_fastokens=True)).process(
            GenerateRequest(prompt=TextPrompt("x"))
        )


async def test_a_conversation_needs_a_chat_template() -> None:
    processor = InputProcessor(MODEL, ModelTokenizer(byte_tokenizer(), use_fastokens=True))

    with pytest.raises(InvalidRequest, match="no chat template"):
        await processor.process(GenerateRequest(prompt=ChatPrompt([ChatMessage("user", "hi")])))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SamplingOptions(temperature=-0.1), "temperature is -0.1; allowed: a finite number, at least 0"),
        (SamplingOptions(temperature=math.nan), "temperature is nan"),
        (SamplingOptions(temperature=math.inf), "temperature is inf"),
        (SamplingOptions(top_k=-2), "top_k is -2"),
        (SamplingOptions(top_p=0.0), "top_p is 0.0; allowed: more than 0, at most 1"),
        (SamplingOptions(top_p=1.1), "top_p is 1.1"),
        (SamplingOptions(top_p=math.nan), "top_p is nan"),
        (SamplingOptions(min_p=-0.1), "min_p is -0.1"),
        (SamplingOptions(min_p=1.5), "min_p is 1.5"),
        (SamplingOptions(presence_penalty=2.5), "presence_penalty is 2.5; allowed: -2 to 2"),
        (SamplingOptions(frequency_penalty=math.nan), "frequency_penalty is nan"),
        (SamplingOptions(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (SamplingOptions(repetition_penalty=math.inf), "repetition_penalty is inf"),
        (SamplingOptions(seed=-1), "seed is -1"),
        (SamplingOptions(max_tokens=0), "max_tokens is 0; allowed: at least 1"),
        (SamplingOptions(max_tokens=-5), "max_tokens is -5"),
        (SamplingOptions(max_tokens=32), "max_tokens is 32; allowed: at most 31, which a prompt of 1 tokens leaves"),
        (SamplingOptions(min_tokens=-1), "min_tokens is -1"),
        (SamplingOptions(max_tokens=3, min_tokens=4), "min_tokens is 4; allowed: at most max_tokens, which is 3"),
        (SamplingOptions(stop=("a", "b", "c")), "stop is ('a', 'b', 'c'); allowed: at most 2 strings"),
        (SamplingOptions(stop=("",)), "stop is ('',); allowed: strings of 1 to 4"),
        (SamplingOptions(stop=("abcde",)), "stop is ('abcde',); allowed: strings of 1 to 4"),
        (SamplingOptions(stop_token_ids=(1, 2, 3)), "stop_token_ids is (1, 2, 3); allowed: at most 2"),
        (SamplingOptions(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids is (257,)"),
        (SamplingOptions(logprobs=21), "logprobs is 21; allowed: 0 to 20"),
        (SamplingOptions(logprobs=-1), "logprobs is -1"),
        (SamplingOptions(prompt_logprobs=21), "prompt_logprobs is 21; allowed: 0 to 20"),
        (
            SamplingOptions(logit_bias={1: 0.0, 2: 0.0, 3: 0.0}),
            "logit_bias is {1: 0.0, 2: 0.0, 3: 0.0}; allowed: at most 2",
        ),
        (SamplingOptions(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias is {257: 1.0}; allowed: token ids"),
        (SamplingOptions(logit_bias={1: 100.5}), "logit_bias is {1: 100.5}; allowed: values from -100 to 100"),
        (SamplingOptions(logit_bias={1: math.nan}), "logit_bias is {1: nan}"),
        (SamplingOptions(allowed_token_ids=()), "allowed_token_ids is (); allowed: 1 to 3 tokens"),
        (SamplingOptions(allowed_token_ids=(1, 2, 3, 4)), "allowed_token_ids is (1, 2, 3, 4); allowed: 1 to 3 tokens"),
        (SamplingOptions(allowed_token_ids=(1, VOCAB_SIZE)), "allowed_token_ids is (1, 257); allowed: token ids"),
        (SamplingOptions(allowed_token_ids=(-1,)), "allowed_token_ids is (-1,); allowed: token ids from 0 to 256"),
        (SamplingOptions(bad_words=("a", "b", "c")), "bad_words is ('a', 'b', 'c'); allowed: at most 2 words"),
        (SamplingOptions(bad_words=("",)), "bad_words is ('',); allowed: words of 1 to 4 characters"),
        (SamplingOptions(bad_words=("  ",)), "bad_words is ('  ',); allowed: words of 1 to 4 characters"),
        (SamplingOptions(bad_words=("abcde",)), "bad_words is ('abcde',); allowed: words of 1 to 4 characters"),
        (SamplingOptions(allowed_token_ids=(97,), bad_words=("a",)), "bad_words is ('a',); allowed: such that"),
    ],
)
async def test_a_bad_sampling_parameter_is_refused(options: SamplingOptions, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await _processor().process(GenerateRequest(prompt=TextPrompt("x"), sampling=options))

    [violation] = raised.value.violations
    assert f"sampling_params.{said}" in str(violation)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(prompt=TextPrompt("x"), request_id="x" * 129), "request_id"),
        (GenerateRequest(prompt=TextPrompt("x"), request_id="new\nline"), "request_id"),
        (GenerateRequest(prompt=TextPrompt("x"), cache_salt="é" * 129), "cache_salt"),
        (GenerateRequest(prompt=TextPrompt("x"), priority=2**31), "priority"),
        (GenerateRequest(prompt=TextPrompt("x"), slo=Aims(ttft_ms=0)), "slo.ttft_ms"),
        (GenerateRequest(prompt=TextPrompt("x"), slo=Aims(itl_ms=3_600_001)), "slo.itl_ms"),
        (GenerateRequest(prompt=TextPrompt("x"), slo=Aims(itl_ms=math.nan)), "slo.itl_ms"),
        (GenerateRequest(prompt=TextPrompt("x"), output_token_ids=(VOCAB_SIZE,)), "output_token_ids"),
        (
            GenerateRequest(prompt=TextPrompt("x"), output_token_ids=(1, 2), sampling=SamplingOptions(max_tokens=2)),
            "output_token_ids",
        ),
    ],
)
async def test_other_bad_fields_are_refused(request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await _processor().process(request_)

    assert [violation.field for violation in raised.value.violations] == [field]


async def test_a_long_prompt_has_fewer_logprobs() -> None:
    processor = _processor(limits=InputLimits(max_prompt_logprobs=12))
    asked = GenerateRequest(prompt=TextPrompt("four"), sampling=SamplingOptions(prompt_logprobs=2))
    await processor.process(asked)

    with pytest.raises(InvalidRequest) as raised:
        await processor.process(replace(asked, prompt=TextPrompt("fives")))

    allowed = "at most 12 in all, that is 5 prompt tokens times one more than this"
    assert str(raised.value) == f"sampling_params.prompt_logprobs is 2; allowed: {allowed}"


async def test_every_violation_is_named_at_once() -> None:
    options = SamplingOptions(temperature=-1.0, top_p=2.0)

    with pytest.raises(InvalidRequest) as raised:
        await _processor().process(GenerateRequest(prompt=TextPrompt(""), sampling=options))

    assert [violation.field for violation in raised.value.violations] == [
        "text",
        "sampling_params.temperature",
        "sampling_params.top_p",
    ]


async def test_a_huge_value_is_shortened_in_its_error() -> None:
    with pytest.raises(InvalidRequest) as raised:
        await _processor().process(GenerateRequest(prompt=TextPrompt("x"), request_id="x" * 100_000))

    assert len(str(raised.value)) < 300


async def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="'other' is not served here"):
        await _processor().process(GenerateRequest(prompt=TextPrompt("x"), model="other"))


async def test_the_models_own_defaults_come_before_raypds_and_after_the_clients() -> None:
    model = replace(MODEL, defaults=GenerationDefaults(temperature=0.6, top_k=5, max_tokens=3))
    plain = (await _processor(model).process(GenerateRequest(prompt=TextPrompt("hi")))).sampling_params
    assert (plain.temperature, plain.top_k, plain.max_tokens) == (0.6, 5, 3)
    own = SamplingOptions(temperature=1.0, max_tokens=9)
    asked = (await _processor(model).process(GenerateRequest(prompt=TextPrompt("hi"), sampling=own))).sampling_params
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (1.0, 5, 9)


async def test_the_models_max_tokens_are_cut_to_the_room_that_is_left() -> None:
    model = replace(MODEL, defaults=GenerationDefaults(max_tokens=4096))
    request = await _processor(model).process(GenerateRequest(prompt=TextPrompt("hi")))
    assert request.sampling_params.max_tokens == 30
