"""Steps are counted by duration and by size, in buckets whose bounds belong to the lower one."""

from __future__ import annotations

from actors.core.outputs.step_stats import STEP_SECONDS, STEP_TOKENS, StepStats


def test_a_step_is_in_the_first_bucket_that_it_fits_in() -> None:
    steps = StepStats()
    for duration_s, num_tokens in ((STEP_SECONDS[0], 1), (STEP_SECONDS[0] * 1.5, 2), (1000.0, 1 << 20)):
        steps.add(duration_s, num_tokens)
    assert [at for at, count in enumerate(steps.num_by_duration) if count] == [0, 1, len(STEP_SECONDS)]
    assert [at for at, count in enumerate(steps.num_by_size) if count] == [0, 1, len(STEP_TOKENS)]
    assert (steps.duration_s, steps.num_tokens) == (1000.0025, (1 << 20) + 3)


def test_a_snapshot_stays_as_it_was() -> None:
    steps = StepStats()
    snapshot = steps.snapshot()
    steps.add(0.5, 7)
    assert snapshot == StepStats()
