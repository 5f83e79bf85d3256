"""With a context of a million tokens no callback takes longer than with a short one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from cluster.api.protos.raypd.v1 import embed_pb2, model_pb2
from tests.attacks import grpc_attacks as grpc
from tests.attacks.http_attacks import post
from tests.attacks.ingress_settings import IngressSettings
from tests.attacks.target import Attack, AttackedIngress, Target, attacked_ingress
from tests.patience import TEST_S

pytestmark = [pytest.mark.more, pytest.mark.timeout(TEST_S)]

_CONTEXT: Final = 1_050_000
_LONG: Final = 1_000_000


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedIngress]:
    """An ingress whose model has a long context."""
    settings = IngressSettings(max_model_len=_CONTEXT)
    with attacked_ingress(tmp_path_factory.mktemp("attacked"), settings) as ingress:
        yield ingress


async def _tokens_by_http(target: Target) -> None:
    prompt = [300 + number % 3000 for number in range(500_000)]
    assert await post(target, "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 1}).encode()) == 200


async def _text_by_http(target: Target) -> None:
    body = {"prompt": grpc.text_of(2 * _LONG), "max_tokens": 1}
    assert await post(target, "/v1/completions", json.dumps(body).encode()) == 200


ATTACKS: Final = [
    Attack("a million tokens", grpc.calls(grpc.GENERATE, lambda: grpc.request(token_ids=grpc.token_ids(_LONG)), 2)),
    Attack("a text of as many", grpc.calls(grpc.GENERATE, lambda: grpc.request(text=grpc.text_of(2 * _LONG)), 2)),
    Attack(
        "tokens to resume", grpc.calls(grpc.GENERATE, lambda: grpc.request(text="x", output_token_ids=[400] * _LONG))
    ),
    Attack(
        "tokens to detokenize",
        grpc.calls(grpc.DETOKENIZE, lambda: model_pb2.DetokenizeRequest(token_ids=[400] * _LONG), 2),
    ),
    Attack(
        "two inputs to embed",
        grpc.calls(
            grpc.EMBED,
            lambda: embed_pb2.EmbedRequest(inputs=[grpc.prompt(token_ids=grpc.token_ids(_LONG))] * 2),
            1,
        ),
    ),
    Attack("http: 500 000 tokens", _tokens_by_http),
    Attack("http: a text of a million tokens", _text_by_http),
]


@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in ATTACKS])
async def test_a_long_prompt_is_felt_by_nobody(attack: Attack, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(attack)
    assert effects.mistakes() == [], effects
