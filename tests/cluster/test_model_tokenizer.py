from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from cluster.errors import TokenizerUnusable
from cluster.generation import ChatMessage, ChatPrompt
from cluster.json_types import JSON
from cluster.model_tokenizer import ChatTemplateError, ModelTokenizer
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
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path))

    assert tokenizer.encode("longer than four") == list(b"longer than four")


@pytest.mark.parametrize("special", [None, ("<eos> $A", "<eos> $A <eos> $B"), ("<eos> $A <eos>", "<eos> $A $B <eos>")])
def test_what_is_too_much_is_cut_as_transformers_cuts_it(special: tuple[str, str] | None) -> None:
    backend = byte_tokenizer()
    if special is not None:
        single, pair = special
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<eos>", EOS_TOKEN_ID)]
        )
    tokenizer = ModelTokenizer(Tokenizer.from_str(backend.to_str()))
    expected = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]  # as above
    texts = ["abcdefg"[:length] for length in range(1, 8)]
    for first, second in product(texts, [None, *texts]):
        least = tokenizer.num_special_tokens(is_pair=second is not None) + 1
        for max_tokens in range(least, 18):
            ids = tokenizer.encode_start(first, second, max_tokens=max_tokens)
            assert ids == expected(first, second, truncation=True, max_length=max_tokens)["input_ids"]


def test_a_conversation_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE))

    assert tokenizer.has_chat_template
    assert bytes(tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")]))) == b"user: hi\nassistant:"


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE))

    with pytest.raises(ChatTemplateError, match="no system"):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("system", "be nice")]))


def test_a_template_sees_tools_variables_and_further_fields(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ mood }} "
        "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, template))
    messages = [ChatMessage("user", "hi", {"name": "Ann"})]
    tools: list[JSON] = [{"type": "function", "function": {"name": "look_up"}}]

    assert bytes(tokenizer.encode_chat(ChatPrompt(messages, tools, {"mood": "calm"}))) == b"look_up calm Ann: hi|"
    no_start: dict[str, JSON] = {"add_generation_prompt": False}
    assert bytes(tokenizer.encode_chat(ChatPrompt(messages, variables=no_start))) == b" Ann: hi"


@pytest.mark.parametrize("variables", [{"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"messages": []}])
def test_a_request_cannot_take_over_the_rendering(tmp_path: Path, variables: dict[str, JSON]) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE))

    with pytest.raises(ChatTemplateError, match=next(iter(variables))):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")], variables=variables))


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path))

    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")]))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="no tokenizer can be loaded"):
        ModelTokenizer.from_directory(tmp_path)


def test_a_template_may_look_at_documents(tmp_path: Path) -> None:
    template = "{% for document in documents %}[{{ document.text }}]{% endfor %}"
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, template))
    prompt = ChatPrompt([ChatMessage("user", "hi")], variables={"documents": [{"text": "one"}, {"text": "two"}]})

    assert bytes(tokenizer.encode_chat(prompt)) == b"[one][two]"
    with pytest.raises(ChatTemplateError):
        tokenizer.encode_chat(ChatPrompt([ChatMessage("user", "hi")], variables={"documents": 5}))
