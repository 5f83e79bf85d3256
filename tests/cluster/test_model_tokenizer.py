from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.errors import TokenizerUnusable
from cluster.generation import ChatMessage
from cluster.model_tokenizer import ChatTemplateError, ModelTokenizer
from tests.fakes import byte_tokenizer

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


def test_a_conversation_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE))

    assert tokenizer.has_chat_template
    assert bytes(tokenizer.encode_chat([ChatMessage("user", "hi")])) == b"user: hi\nassistant:"


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path, TEMPLATE))

    with pytest.raises(ChatTemplateError, match="no system"):
        tokenizer.encode_chat([ChatMessage("system", "be nice")])


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(_saved(tmp_path))

    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([ChatMessage("user", "hi")])


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="no tokenizer can be loaded"):
        ModelTokenizer.from_directory(tmp_path)
