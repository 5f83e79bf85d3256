"""One NCCL for torch and cupy. If this fails, nothing else in this folder can pass."""

from __future__ import annotations

import pytest

from kv_transfer.transports.nccl_library import load_nccl, nccl_report
from tests.gpu.conftest import Say

pytestmark = pytest.mark.gpu


def test_torch_and_cupy_share_one_library(say: Say) -> None:
    report = nccl_report()
    say(str(report))
    assert report.problem == ""
    assert len(report.libnccl_paths) == 1


def test_unique_ids_are_bytes_and_differ() -> None:
    library = load_nccl()
    ids = [library.make_unique_id() for _ in range(2)]
    assert [len(unique_id) for unique_id in ids] == [128, 128]
    assert ids[0] != ids[1]
