"""The records of the four slow requests have the causes that docs/observability.md names.

Tests of cluster/observability/stories/find_cause.py.
"""

from __future__ import annotations

from cluster.observability.stories.make_story import make_story
from tests.cluster.api.http.live_page.slow_requests import CAUSES, slow_requests


def test_each_cause_is_named() -> None:
    found = {record.request_id: make_story(record).cause for record in slow_requests()}
    assert found.keys() == CAUSES.keys()
    assert [name for name, cause in CAUSES.items() if cause not in found[name]] == [], found
