import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from cluster.errors import TokenizerUnusable
from cluster.parameters.generation import ChatMessage, ChatPrompt
from cluster.parameters.json_types import JSON
from cluster.text.model_tokenizer import ChatTemplateError, ModelTokenizer
from tests.fakes import EOS_TOKEN_ID, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def _saved(directory: Path, template: str | None = None) -> Path:
    backend = byte_tokenizer()
    # What training left behind must not cut prompts.
    backend.enable_truncation(max_length=4)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")  # type: ignore[no-untyped-call]  # transformers has no types here
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def test_a_prompt_is_never_truncated(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path), use_fastokens=True)

    assert tokenizer.encode("longer than four") == list(b"longer than four")


_CLASSES = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "GPT2TokenizerFast",
    "GemmaTokenizer",
    "BertTokenizer",
    "NobodysTokenizer",
    None,
)


@pytest.mark.parametrize("tokenizer_class", _CLASSES)
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "llava", "phi3", "gpt2", "bert"]
)
def test_it_is_the_tokenizer_that_transformers_takes_for_the_model(
    tmp_path: Path, model_type: str, tokenizer_class: str | None
) -> None:
    _saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))

    expected = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).backend_tokenizer
    expected.no_truncation()

    assert ModelTokenizer.from_directory(tmp_path, use_fastokens=True).backend.to_str() == expected.to_str()


@pytest.mark.parametrize("named", [True, False])
def test_a_models_configuration_is_only_loaded_where_the_tokenizer_does_not_name_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """It would bring along what models are made of: an ingress would start a second later, and be 150 MiB larger."""
    load = AutoConfig.from_pretrained
    loaded = []

    def from_pretrained(directory: Path, **options: Any) -> Any:  # transformers' own
        loaded.append(directory)
        return load(directory, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    _saved(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if not named:
        (tmp_path / "tokenizer_config.json").unlink()

    ModelTokenizer.from_directory(tmp_path, use_fastokens=True)
    assert loaded == ([] if named else [tmp_path])


@pytest.mark.parametrize("special", [None, ("<eos> $A", "<eos> $A <eos> $B"), ("<eos> $A <eos>", "<eos> $A $B <eos>")])
def test_what_is_too_much_is_cut_as_transformers_cuts_it(special: tuple[str, str] | None) -> None:
    backend = byte_tokenizer()
    if special is not None:
        single, pair = special
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<eos>", EOS_TOKEN_ID)]
        )
    tokenizer = ModelTokenizer(Tokenizer.from_str(backend.to_str()), use_fastokens=True)
    expected = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]  # as above
    texts = ["abcdefg"[:length] for length in range(1, 8)]
    for first, second in product(texts, [None, *texts]):
        least = tokenizer.num_special_tokens(is_pair=second is not None) + 1
        for max_tokens in range(least, 18):
            ids = tokenizer.encode_start(first, second, max_tokens=max_tokens)
            assert ids == expected(first, second, truncation=True, max_length=max_tokens)["input_ids"]


def test_a_conversation_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE), use_fastokens=True)

    assert tokenizer.has_chat_template
    assert bytes(tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")]))) == b"user: hi\nassistant:"


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE), use_fastokens=True)

    with pytest.raises(ChatTemplateError, match="no system"):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("system", "be nice")]))


def test_a_template_sees_tools_variables_and_further_fields(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ mood }} "
        "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, template), use_fastokens=True)
    messages = [ChatMessage("user", "hi", {"name": "Ann"})]
    tools: list[JSON] = [{"type": "function", "function": {"name": "look_up"}}]

    assert bytes(tokenizer.encode_chat(ChatPrompt(messages, tools, {"mood": "calm"}))) == b"look_up calm Ann: hi|"
    no_start: dict[str, JSON] = {"add_generation_prompt": False}
    assert bytes(tokenizer.encode_chat(ChatPrompt(messages, variables=no_start))) == b" Ann: hi"


@pytest.mark.parametrize("variables", [{"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"messages": []}])
def test_a_request_cannot_take_over_the_rendering(tmp_path: Path, variables: dict[str, JSON]) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE), use_fastokens=True)

    with pytest.raises(ChatTemplateError, match=next(iter(variables))):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")], variables=variables))


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path), use_fastokens=True)

    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")]))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="no tokenizer can be loaded"):
        ModelTokenizer.from_directory(tmp_path, use_fastokens=True)


def test_a_template_may_look_at_documents(tmp_path: Path) -> None:
    template = "{% for document in documents %}[{{ document.text }}]{% endfor %}"
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, template), use_fastokens=True)
    prompt = ChatPrompt([ChatMessage("user", "hi")], variables={"documents": [{"text": "one"}, {"text": "two"}]})

    assert bytes(tokenizer.encode_chat(prompt)) == b"[one][two]"
    with pytest.raises(ChatTemplateError):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")], variables={"documents": 5}))
