"""A long JSON schema is checked on a thread, once, and is refused all the same.

Tests of cluster/text/input_processor.py and cluster/parameters/structured_output_rules.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from actors.core.requests.sampling_params import StructuredOutputParams
from cluster.errors import InvalidRequest
from cluster.parameters import json_schema_rules, structured_output_rules
from cluster.parameters.generation import GenerateRequest, TextPrompt
from cluster.parameters.json_schema_rules import SchemaProblem
from cluster.parameters.json_types import JSON
from cluster.parameters.sampling_options import SamplingOptions
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer
from tests.fakes import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

MODEL: Final = ModelDescription(name="tiny", max_model_len=64, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def request_for(schema: JSON) -> GenerateRequest:
    form = StructuredOutputParams("json_schema", json.dumps(schema))
    return GenerateRequest(request_id="r0", prompt=TextPrompt("x"), sampling=SamplingOptions(structured_output=form))


async def test_a_long_schema_is_checked_on_a_thread_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def find(schema: JSON, max_depth: int) -> Iterator[SchemaProblem]:
        threads.append(threading.current_thread())
        return json_schema_rules.find_unsupported(schema, max_depth)

    monkeypatch.setattr(structured_output_rules, "find_unsupported", find)
    processor = InputProcessor(MODEL, ModelTokenizer(byte_tokenizer(), use_fastokens=True))
    await processor.process(request_for({"anyOf": [{"type": "null"}] * 300, "title": "long"}))
    assert len(threads) == 1
    assert threads.pop() is not threading.current_thread()
    await processor.process(request_for({"anyOf": [{"type": "null"}] * 3, "title": "short"}))
    assert threads == [threading.current_thread()]
    with pytest.raises(InvalidRequest, match="too many schemas"):
        await processor.process(request_for({"anyOf": [{}] * 5000, "title": "too long"}))
