"""The settings of TLS within the cluster."""

from __future__ import annotations

import pytest

from cluster.config import load_cluster_config
from cluster.errors import InvalidConfig


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_relative_path_is_refused_since_processes_run_in_different_directories(name: str) -> None:
    files = {"ca": "/ca.pem", "certificate": "/c.pem", "key": "/k.pem"} | {name: "here.pem"}
    with pytest.raises(InvalidConfig, match=rf"internal_tls\.\S*{name} = 'here\.pem'.*absolute path"):
        load_cluster_config(None, {"internal_tls": files})
