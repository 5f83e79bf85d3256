"""The orders to the processes of a run, carried out in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.reach import Reach
from tests.patience import TEST_S

_SERVER = """
import asyncio, sys, time
import grpc

async def tell(request, context):
    return f"{context.time_remaining()} {time.time()}".encode()

async def main():
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("a.B", {"C": grpc.unary_unary_rpc_method_handler(tell)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2):
            print((await channel.unary_unary("/a.B/C")(b"", timeout=50)).decode())
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("offset_s", [3600.0, -3600.0])
def test_a_stepped_clock_changes_no_deadline_of_grpc(tmp_path: Path, offset_s: float) -> None:
    reach = Reach(tmp_path / "orders")
    reach.step_clock(offset_s)
    before_s = os.times().elapsed
    told = subprocess.run(
        [sys.executable, "-c", _SERVER], env=os.environ | reach.environment, check=True, capture_output=True, text=True
    )
    assert os.times().elapsed - before_s < 50
    [date] = subprocess.run(["date", "+%s"], check=True, capture_output=True, text=True).stdout.split()
    remaining_s, wall_s = map(float, told.stdout.splitlines()[-1].split())
    assert 0 < remaining_s <= 51
    assert abs(wall_s - float(date) - offset_s) < 50
