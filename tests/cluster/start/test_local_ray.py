"""Joining a Ray cluster that is not there, is something else, or does not take us: words instead of minutes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest
import ray

from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.start import local_ray
from cluster.start.ray_directory import RayDirectory


class _Head(grpc.GenericRpcHandler):
    """Ray's head, so far as it is asked whether it is there."""

    def __init__(self, method: str, code: grpc.StatusCode) -> None:
        self._method = method
        self._code = code

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if handler_call_details.method != self._method:
            return None

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.set_code(self._code)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def _listening(method: str, code: grpc.StatusCode = grpc.StatusCode.OK) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Head(method, code)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _connect(address: str) -> None:
    local_ray.connect(ClusterConfig.model_validate({"ray": {"address": address}}))


@pytest.fixture(autouse=True)
def ray_was_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray was told to join."""
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.setattr(local_ray, "_ANSWER_TIMEOUT_S", 60.0)
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append(address))
    return asked


@pytest.fixture
def ray_refuses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    def refuse(error: Exception) -> None:
        def init(**options: object) -> None:
            raise error

        monkeypatch.setattr(ray, "init", init)

    return refuse


@pytest.mark.parametrize("listens", [False, True], ids=["nobody-listens", "silence"])
def test_no_head_is_said_after_a_while(
    listens: bool, ray_was_asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "_ANSWER_TIMEOUT_S", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            CannotStart, match=rf"no head of a Ray cluster has answered at {address} for 0.3 s: .* 6379"
        ):
            _connect(address)
    assert not ray_was_asked


def test_something_else_is_not_taken_for_a_head(ray_was_asked: list[str]) -> None:
    with (
        _listening("/raypd.v1.GenerateService/Generate") as address,
        pytest.raises(CannotStart, match=f"the server at {address} is not the head of a Ray cluster"),
    ):
        _connect(address)
    assert not ray_was_asked


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL])
def test_a_head_is_joined_whatever_it_says(code: grpc.StatusCode, ray_was_asked: list[str]) -> None:
    with _listening(local_ray._IS_ALIVE, code) as address:
        _connect(address)
        assert ray_was_asked == [address]


def test_a_head_that_only_ray_can_find_is_left_to_it(ray_was_asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _connect("auto")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    _connect("127.0.0.1:9")
    assert ray_was_asked == ["auto", "127.0.0.1:9"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [(grpc.StatusCode.OK, "$"), (grpc.StatusCode.UNAUTHENTICATED, "; it asks for a token: .* RAY_AUTH_TOKEN_PATH")],
)
def test_a_head_that_does_not_take_us_is_said_with_its_reason(
    code: grpc.StatusCode, advice: str, ray_refuses: Callable[[Exception], None]
) -> None:
    ray_refuses(RuntimeError("Version mismatch:\n  2.59"))
    with (
        _listening(local_ray._IS_ALIVE, code) as address,
        pytest.raises(CannotStart, match=f"{address} cannot be joined: Version mismatch: 2.59{advice}"),
    ):
        _connect(address)


def test_a_ray_that_cannot_start_here_is_an_error_in_words_and_its_logs_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def time_out(**options: object) -> None:
        raise Exception("The current node timed out during startup. The raylet failed to startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "RayDirectory", lambda: RayDirectory(tmp_path))
    monkeypatch.setattr(ray, "init", time_out)
    with (
        patch.dict(os.environ),
        pytest.raises(CannotStart, match=r"^Ray cannot be started on this machine .*: The current node timed out"),
    ):
        local_ray.connect(ClusterConfig())
    assert [record.message for record in caplog.records] == ["the logs of the local Ray cluster are kept"]
    assert len(list(tmp_path.iterdir())) == 1
