"""Drafts are made where they are likely to be right and cheap to check."""

from __future__ import annotations

import numpy as np
import pytest

from actors.config import SpeculativeConfig
from actors.core.drafts.draft_control import DraftControl
from actors.core.outputs.model_runner_output import DraftTokenIds, ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import PromptEmbeds, RequestStatus
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.scheduler import Scheduler
from actors.errors import IntegrityError
from kv_transfer.params import TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import FakeConnector, FakeGrammars


def sample_one(scheduler: Scheduler, step: SchedulerOutput, drafts: DraftTokenIds | None = None) -> None:
    """Take in token 11 for each request of a step."""
    req_ids = step.batch.req_ids
    output = ModelRunnerOutput(req_ids, [[11]] * len(req_ids), draft_token_ids=drafts)
    scheduler.update_from_output(step, output)


def wanted(step: SchedulerOutput) -> dict[str, int]:
    if step.num_drafts_wanted is None:
        return {}
    return dict(zip(step.batch.req_ids, step.num_drafts_wanted.tolist(), strict=True))


def test_without_settings_nothing_is_wanted() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 6, max_tokens=20))
    assert scheduler.schedule().num_drafts_wanted is None


def test_drafts_are_wanted_as_soon_as_the_prompt_is_through_and_not_before() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 12, max_tokens=20))
    first = scheduler.schedule()
    assert wanted(first) == {}
    scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[]]))
    assert wanted(scheduler.schedule()) == {"a": 3}


def test_nothing_is_drafted_that_a_request_could_not_use() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("a", 6, max_tokens=4, ignore_eos=True))
    step = scheduler.schedule()
    assert wanted(step) == {"a": 2}
    sample_one(scheduler, step)
    step = scheduler.schedule()
    assert wanted(step) == {"a": 1}
    sample_one(scheduler, step)
    assert wanted(scheduler.schedule()) == {}


def test_the_more_requests_run_the_fewer_tokens_each_drafts_and_a_full_batch_none() -> None:
    for num_requests, num_each in ((1, 4), (2, 3), (4, 2), (8, 1), (14, 0), (20, 0)):
        scheduler = make_scheduler(
            speculative=SpeculativeConfig(num_tokens=4, max_step_tokens=20, min_acceptance=0.2),
            max_num_seqs=20,
            num_blocks=128,
            max_num_batched_tokens=64,
        )
        for number in range(num_requests):
            scheduler.add_request(make_request(f"r{number}", 2, max_tokens=20, ignore_eos=True))
        assert set(wanted(scheduler.schedule()).values()) == ({num_each} if num_each else set()), num_requests


def test_a_request_whose_drafts_fail_is_given_up_and_tried_again_later() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, max_model_len=600, num_blocks=200)
    scheduler.add_request(make_request("a", 6, max_tokens=500, ignore_eos=True))
    numbers = []
    for _ in range(120):
        step = scheduler.schedule()
        numbers.append(wanted(step).get("a", 0))
        sample_one(scheduler, step, DraftTokenIds(["a"], [[5] * numbers[-1]]) if numbers[-1] else None)
    assert numbers[0] == 3
    assert 0 < sum(numbers[20:]) < 30
    assert numbers.index(0) < 10


def test_a_request_whose_drafts_are_right_keeps_drafting_as_many_as_it_may() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, max_model_len=600, num_blocks=200)
    scheduler.add_request(make_request("a", 6, max_tokens=400, ignore_eos=True))
    for _ in range(60):
        step = scheduler.schedule()
        drafts = step.scheduled_spec_decode_tokens.get("a", [])
        assert wanted(step) == {"a": 3}
        output = ModelRunnerOutput(["a"], [[*drafts, 11]], draft_token_ids=DraftTokenIds(["a"], [[5, 6, 7]]))
        scheduler.update_from_output(step, output)
    stats = scheduler.make_stats().spec_decoding_stats
    assert stats is not None
    assert stats.num_accepted_tokens_per_pos == [59, 59, 59]


def test_a_rows_next_owner_begins_without_its_former_owners_luck() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, max_num_seqs=1)
    scheduler.add_request(make_request("a", 6, max_tokens=30, ignore_eos=True))
    for _ in range(12):
        step = scheduler.schedule()
        sample_one(scheduler, step, DraftTokenIds(["a"], [[5, 5, 5]]))
    assert wanted(scheduler.schedule()) == {}
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("b", 6, max_tokens=30, ignore_eos=True))
    assert wanted(scheduler.schedule()) == {"b": 3}


def test_who_does_not_generate_here_drafts_nothing() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(num_speculative_tokens=3, connector=connector)
    scheduler.add_request(make_request("producer", 6, max_tokens=30, role=TransferRole.PRODUCER))
    connector.ready.add("producer")
    embeds = PromptEmbeds(bytes(24), num_tokens=6, hidden_size=1, dtype="float32", digest=b"e")
    scheduler.add_request(make_request("embeds", [0] * 6, max_tokens=30, prompt_embeds=embeds))
    step = scheduler.schedule()
    assert set(step.batch.req_ids) == {"producer", "embeds"}
    assert wanted(step) == {}


def test_drafts_are_cut_where_a_grammar_forbids_them() -> None:
    grammars = FakeGrammars(forbidden=6)
    scheduler = make_scheduler(num_speculative_tokens=3, structured_output=grammars)
    scheduler.add_request(make_request("a", 6, max_tokens=30, structured_output=StructuredOutputParams("json_object")))
    grammars.compiled["a"] = None
    step = scheduler.schedule()
    assert wanted(step) == {"a": 3}
    sample_one(scheduler, step, DraftTokenIds(["a"], [[5, 6, 7]]))
    step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens == {"a": [5]}
    sample_one(scheduler, step, DraftTokenIds(["a"], [[6, 7, 8]]))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_nobody_runs_ahead_of_a_step_that_drafts() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, overlap=True)
    scheduler.add_request(make_request("a", 6, max_tokens=4, ignore_eos=True))
    first = scheduler.schedule()
    assert wanted(first) == {"a": 2}
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    sample_one(scheduler, first, DraftTokenIds(["a"], [[5, 5]]))
    second = scheduler.schedule()
    assert second.scheduled_spec_decode_tokens == {"a": [5, 5]}
    sample_one(scheduler, second)
    third = scheduler.schedule()
    assert (wanted(third), third.num_scheduled_tokens) == ({}, {"a": 1})
    # Now that nothing is drafted, the last token's step need not wait for the one before it.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_a_draft_preempts_nobody() -> None:
    scheduler = make_scheduler(num_blocks=5, num_speculative_tokens=8)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 7, max_tokens=8, ignore_eos=True))
    step = scheduler.schedule()
    sample_one(scheduler, step, DraftTokenIds(["a", "b"], [[1] * 6, [2] * 6]))
    # Two blocks of four each and one free: a's 8 tokens and 4 drafts fit, nothing is left for b's.
    step = scheduler.schedule()
    assert not step.preempted_req_ids
    assert step.scheduled_spec_decode_tokens == {"a": [1] * 4}
    assert step.num_scheduled_tokens == {"a": 5, "b": 1}
    scheduler.check_integrity()


def test_who_checks_drafts_does_not_wait_for_a_prompt_that_was_admitted_before_it() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    scheduler.add_request(make_request("long", 40, max_tokens=20, ignore_eos=True))
    scheduler.add_request(make_request("short", 2, max_tokens=20, ignore_eos=True))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"long": 4, "short": 2}
    drafts = DraftTokenIds(["short"], [[5, 6, 7]])
    scheduler.update_from_output(step, ModelRunnerOutput(["long", "short"], [[], [11]], draft_token_ids=drafts))
    assert scheduler.schedule().num_scheduled_tokens == {"short": 4, "long": 4}


def test_drafts_are_cut_to_what_a_step_has_left_even_where_prompts_are_not() -> None:
    scheduler = make_scheduler(
        num_speculative_tokens=5, max_num_batched_tokens=8, max_num_seqs=3, enable_chunked_prefill=False
    )
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 2, max_tokens=20, ignore_eos=True))
    step = scheduler.schedule()
    assert wanted(step) == {"a": 1, "b": 1, "c": 1}, "or one's drafts would take the token that another one decodes"
    sample_one(scheduler, step, DraftTokenIds(["a", "b"], [[1] * 4, [2] * 5]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"c": 1, "a": 5, "b": 2}
    assert step.scheduled_spec_decode_tokens == {"a": [1] * 4, "b": [2]}


def test_luck_is_counted_only_up_to_the_first_wrong_draft() -> None:
    control = DraftControl(SpeculativeConfig(num_tokens=8), max_num_seqs=1, max_num_batched_tokens=64)
    control.learn(0, num_drafted=8, num_accepted=3)
    control.learn(0, num_drafted=2, num_accepted=2)
    assert (control._tried[0], control._right[0]) == (6, 5)
    assert np.isclose(control._right[0] / control._tried[0], 5 / 6)


def test_drafts_that_were_filled_up_to_a_common_length_count_without_the_filling() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("a", 6, max_tokens=30))
    scheduler.add_request(make_request("b", 6, max_tokens=30))
    sample_one(scheduler, scheduler.schedule(), DraftTokenIds(["a", "b"], [[5, -1, -1], [-1, -1, -1]]))
    step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens == {"a": [5]}
    assert step.num_scheduled_tokens == {"a": 2, "b": 1}


@pytest.mark.parametrize("drafts", [None, DraftTokenIds(["a"], [[5, 6, 7]])])
def test_a_worker_that_gives_no_token_where_one_is_due_is_a_broken_invariant(drafts: DraftTokenIds | None) -> None:
    """Otherwise the request would wait for it for ever."""
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request(make_request("a", 6, max_tokens=30))
    sample_one(scheduler, scheduler.schedule(), drafts)
    step = scheduler.schedule()
    with pytest.raises(IntegrityError, match="no token was sampled"):
        scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[]]))


def test_a_prompt_that_is_through_without_a_token_is_a_broken_invariant() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 6, max_tokens=30))
    step = scheduler.schedule()
    with pytest.raises(IntegrityError, match="a: all its tokens are computed"):
        scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[]]))
