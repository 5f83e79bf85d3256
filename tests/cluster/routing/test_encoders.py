"""The choice of the engine that encodes an item."""

from __future__ import annotations

from actors.core.requests.multimodal import EncoderInput, MultiModalFeature
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.routing.encoders import choose_encoder
from cluster.routing.engine_connection import EngineRole
from kv_transfer.links.link_compatibility import PairingFacts
from tests.cluster.routing.test_base import A, B, C, load


def choose(name: str, *engine_ids: str, pairing: PairingFacts = A) -> str | None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        mm_features=(MultiModalFeature(name, 0, 1, 1),),
        encoder_inputs=(EncoderInput(name, {}),),
    )
    others = [load("p0", EngineRole.PREFILL), load("d0", EngineRole.DECODE), load("b0", EngineRole.BOTH)]
    encoders = [load(engine_id, EngineRole.ENCODE, pairing) for engine_id in engine_ids]
    chosen = choose_encoder(request, [*others, *encoders], others[0].descriptor)
    return None if chosen is None else chosen.engine_id


def test_only_encode_engines_are_asked() -> None:
    assert choose("cat") is None
    assert choose("cat", "e0") == "e0"


def test_an_engine_that_can_have_no_link_with_who_prefills_is_not_asked() -> None:
    assert choose("cat", "e0", pairing=C) == "e0"
    assert choose("cat", "e0", pairing=B) is None


def test_an_image_stays_where_it_is_when_others_come_and_go() -> None:
    names = [f"image-{number}" for number in range(200)]
    before = {name: choose(name, "e0", "e1", "e2") for name in names}
    assert {name: choose(name, "e2", "e1", "e0") for name in names} == before
    assert all(60 > sum(chosen == engine for chosen in before.values()) - 20 > 20 for engine in ("e0", "e1", "e2"))
    assert all(choose(name, "e0", "e1") == chosen for name, chosen in before.items() if chosen != "e2")
