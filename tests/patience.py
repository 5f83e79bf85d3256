"""How long tests wait for other processes: a busy machine may be several times slower than an idle one."""

from __future__ import annotations

from typing import Final

# Whole clusters: engines that start, drain, are replaced.
CLUSTER_S: Final = 300.0
# Of a test that uses one, several such waits long.
TEST_S: Final = 900
