"""The settings of the request trace.

Tests of cluster/settings/request_recording.py.
"""

from __future__ import annotations

import pytest

from cluster.config import load_cluster_config
from cluster.errors import InvalidConfig
from cluster.traces.request_trace import BlockHashes


def test_a_directory_alone_is_enough() -> None:
    recording = load_cluster_config(
        None, {"ingress": {"request_trace": {"directory": "/traces"}}}
    ).ingress.request_trace
    assert recording is not None
    assert (str(recording.directory), recording.block_hashes) == ("/traces", BlockHashes.PER_FILE)


def test_without_a_directory_there_is_no_trace() -> None:
    assert load_cluster_config(None, {"ingress": {"request_trace": {"directory": None}}}).ingress.request_trace is None


def test_a_relative_directory_is_refused_since_ingresses_run_in_different_directories() -> None:
    with pytest.raises(InvalidConfig, match=r"request_trace\.directory = 'here'.*absolute path"):
        load_cluster_config(None, {"ingress": {"request_trace": {"directory": "here"}}})
