"""A complete output is valid by its JSON schema, whichever is admitted. The model writes at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from actors.core.requests.request import FinishReason
from actors.core.requests.sampling_params import SamplingParams, StructuredOutputParams
from cluster.parameters.json_schema_rules import find_unsupported
from cluster.parameters.json_types import JSON
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine_pair import EnginePair, engine_config
from tests.random_schemas import random_schema
from tests.reference import random_prompt
from tests.structured import compiling_in_process

pytestmark = pytest.mark.usefixtures("shared_models")

_NUM_TOKENS = 200
_NUM_AT_ONCE = 25
_ENDS = ['"', "}", "]", ",", ":"]
_CheckpointOf = Callable[[str], Path]


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 525), marks=[pytest.mark.long, pytest.mark.timeout(900)])], ids=len
)
def test_every_output_that_is_complete_is_valid(seeds: range, checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    # Random weights would never end a string.
    bias = dict.fromkeys((tokenizer.encode(end).ids[0] for end in _ENDS), 6.0) | {EOS_TOKEN_ID: 20.0}
    config = engine_config(directory, block_size=8, num_blocks=1024, overlap=True)
    num_complete = 0
    with compiling_in_process(), EnginePair(config, config) as pair:
        for first in range(0, len(seeds), _NUM_AT_ONCE):
            num_complete += _check(pair, seeds[first : first + _NUM_AT_ONCE], bias, tokenizer)
    assert num_complete > 0.9 * len(seeds)


def _check(pair: EnginePair, seeds: Iterable[int], bias: dict[int, float], tokenizer: Tokenizer) -> int:
    schemas = {f"schema-{seed}": random_schema(seed) for seed in seeds}
    for seed, (name, schema) in enumerate(schemas.items()):
        assert not list(find_unsupported(schema, 32)), schema
        params = SamplingParams(
            temperature=1.0,
            seed=seed,
            logit_bias=bias,
            max_tokens=_NUM_TOKENS,
            structured_output=StructuredOutputParams("json_schema", json.dumps(schema)),
        )
        pair.hand_over(name, random_prompt(12, seed=seed), params)
    pair.run()
    return sum(_is_complete_and_valid(pair, name, schema, tokenizer) for name, schema in schemas.items())


def _is_complete_and_valid(pair: EnginePair, name: str, schema: dict[str, JSON], tokenizer: Tokenizer) -> bool:
    answer = pair.answers[name]
    # On a busy machine a handoff may time out; the decode engine then does all of it.
    ends = [end.finish_reason for end in answer.last.values() if end.error is None and end.finish_reason is not None]
    assert len(ends) == 1, (schema, answer.last)
    if ends != [FinishReason.STOP]:
        return False
    text = tokenizer.decode(answer.token_ids)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True
