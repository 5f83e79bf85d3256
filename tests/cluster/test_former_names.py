"""Imports that the documents of raypd 0.1 named go on working.

Tests of cluster/ingress/__init__.py.
"""

from __future__ import annotations

import importlib

import pytest

from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc


def test_the_generated_code_is_the_same_by_its_former_name() -> None:
    former = importlib.import_module("cluster.ingress.protos.raypd.v1")
    assert former.generate_pb2 is generate_pb2
    assert importlib.import_module("cluster.ingress.protos.raypd.v1.generate_pb2_grpc") is generate_pb2_grpc


@pytest.mark.parametrize(
    ("former", "now", "name"),
    [
        ("actors.core.request", "actors.core.requests.request", "EngineCoreRequest"),
        ("actors.core.sampling_params", "actors.core.requests.sampling_params", "SamplingParams"),
        ("actors.core.block_hash", "actors.core.requests.block_hash", "BlockHasher"),
    ],
)
def test_the_schedulers_parts_are_the_same_by_their_former_names(former: str, now: str, name: str) -> None:
    assert getattr(importlib.import_module(former), name) is getattr(importlib.import_module(now), name)
