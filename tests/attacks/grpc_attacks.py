"""What clients can send by gRPC to take an ingress down, or others' answers away."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from cluster.client import Credentials
from cluster.client.channel import open_channel
from cluster.ingress.protos.raypd.v1 import generate_pb2
from tests.attacks.target import Attack, Target

_TIMEOUT_S: Final = 30.0
OPTIONAL_PROPERTIES: Final = json.dumps({"type": "object", "properties": {f"p{i}": True for i in range(2000)}})
ITSELF: Final = json.dumps({"$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [{"$ref": "#/$defs/a"}] * 64})


async def call(target: Target, method: str, request: Message | bytes, token: str | None = None) -> grpc.StatusCode:
    """Make a call, read all of its answer and return how it ended. method: "GenerateService/Generate", for instance."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    credentials = Credentials(target.token if token is None else token)
    async with open_channel(target.grpc_address, credentials) as channel:
        stream: Any = channel.unary_stream(f"/raypd.v1.{method}")
        try:
            async for _ in stream(data, timeout=_TIMEOUT_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def sampling(**fields: Any) -> generate_pb2.GenerateRequest:
    """A request for one token that is short but for these fields of its sampling_params."""
    params = generate_pb2.SamplingParams(**({"max_tokens": 1} | fields))
    return generate_pb2.GenerateRequest(text="x", sampling_params=params)


def overlapping_schema(num_enums: int, num_values: int, num_properties: int) -> str:
    """A oneOf of references to enums without a value in common, in each of many properties."""
    enums = {f"e{i}": {"enum": [f"{i}-{j}" for j in range(num_values)]} for i in range(num_enums)}
    one_of = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    properties = {f"p{i}": one_of for i in range(num_properties)}
    return json.dumps({"type": "object", "$defs": enums, "properties": properties}, separators=(",", ":"))


def calls(method: str, make: Callable[[], Message | bytes], num_calls: int = 4) -> Callable[[Target], Awaitable[None]]:
    """Make the same call some times at once. make: its message"""
    once = functools.cache(make)

    async def send(target: Target) -> None:
        await asyncio.gather(*(call(target, method, once()) for _ in range(num_calls)))

    return send


ENUMS: Final = overlapping_schema(num_enums=64, num_values=50, num_properties=25)
MANY_SCHEMAS: Final = json.dumps({"anyOf": [{}] * 20_000}, separators=(",", ":"))
CONSTANTS: Final = json.dumps({"enum": [0] * 16_000, "type": ["integer"] * 2500}, separators=(",", ":"))
GENERATE: Final = "GenerateService/Generate"

ATTACKS: list[Attack] = [
    Attack("a schema whose enums are compared to each other", calls(GENERATE, lambda: sampling(json_schema=ENUMS))),
    Attack("a schema of 20 000 schemas", calls(GENERATE, lambda: sampling(json_schema=MANY_SCHEMAS))),
    Attack("a schema of many constants and types", calls(GENERATE, lambda: sampling(json_schema=CONSTANTS))),
    Attack("regular expressions of 20 000 parentheses", calls(GENERATE, lambda: sampling(regex="(" * 20_000))),
    Attack("a schema of 2000 optional properties", calls(GENERATE, lambda: sampling(json_schema=OPTIONAL_PROPERTIES))),
    Attack("a schema that refers to itself", calls(GENERATE, lambda: sampling(json_schema=ITSELF))),
]
