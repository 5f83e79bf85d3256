"""WAITING_FOR_FSM: a request waits for its grammar and for nothing else; the grammar sees every token once.

Tests of actors/core/preparation.py, actors/core/queue/grammar_wait.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason, RequestStatus
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.structured_output import GrammarFailure
from kv_transfer.params import TransferRole
from tests.actors.core.builders import Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, FakeGrammars, loaded, reference_tokens
from tests.kv_transfer.reported import output_of

JSON = StructuredOutputParams("json_object")
PROMPT = range(1, 7)


def test_a_request_waits_for_its_grammar_and_others_pass() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars))
    request = make_request("a", PROMPT, structured_output=JSON, max_tokens=3, ignore_eos=True)
    driver.scheduler.add_request(request)
    driver.scheduler.add_request(make_request("b", 4, max_tokens=3, ignore_eos=True))
    driver.step()
    assert (request.status, driver.scheduled()) == (RequestStatus.WAITING_FOR_FSM, {"b": 4})
    grammars.compiled["a"] = None
    driver.step()
    assert driver.scheduled() == {"b": 1, "a": 6}
    driver.run()
    assert grammars.tokens["a"] == driver.tokens_of("a") == reference_tokens(PROMPT, 3, eos=-1)
    assert grammars.released == ["a"]


def test_the_step_names_the_requests_that_need_a_mask_by_their_place_in_the_batch() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars))
    driver.scheduler.add_request(make_request("b", 4, max_tokens=5, ignore_eos=True))
    driver.scheduler.add_request(make_request("a", PROMPT, structured_output=JSON, max_tokens=5, ignore_eos=True))
    grammars.compiled["a"] = None
    for _ in range(3):
        driver.step()
        place = driver.steps[-1].structured_output_request_ids["a"]
        assert driver.steps[-1].batch.req_ids[place] == "a"


def test_a_prompt_that_is_not_through_needs_no_mask_yet() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars, max_num_batched_tokens=8))
    driver.scheduler.add_request(make_request("a", 12, structured_output=JSON, max_tokens=2, ignore_eos=True))
    grammars.compiled["a"] = None
    driver.run()
    needs_mask = [bool(step.structured_output_request_ids) for step in driver.steps]
    assert needs_mask == [False, True, True, False]


def test_a_grammar_that_does_not_compile_ends_its_request_alone_with_the_compilers_words() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars))
    driver.scheduler.add_request(make_request("a", 4, structured_output=JSON))
    driver.scheduler.add_request(make_request("b", 4, max_tokens=2))
    grammars.compiled["a"] = GrammarFailure("unexpected '}' at 3")
    driver.run()
    assert (driver.end_of("a").finish_reason, driver.end_of("a").error) == (FinishReason.ERROR, "unexpected '}' at 3")
    assert driver.end_of("a").end_cause is EndCause.REQUEST_AT_FAULT
    assert driver.end_of("b").error is None


def test_a_grammar_has_a_deadline() -> None:
    clock = Clock()
    driver = Driver(make_scheduler(structured_output=FakeGrammars(), clock=clock))
    driver.scheduler.add_request(make_request("a", 4, structured_output=JSON))
    driver.step()
    assert driver.scheduler.next_deadline() == clock.now_s + 30.0
    clock.now_s += 30.0
    driver.step()
    assert driver.end_of("a").error == "the grammar was not compiled within 30 s"
    assert driver.end_of("a").end_cause is None
    assert driver.scheduler.next_deadline() is None


def test_a_request_is_aborted_while_its_grammar_compiles_and_the_late_grammar_is_dropped() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars))
    driver.scheduler.add_request(make_request("a", 4, structured_output=JSON))
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    grammars.compiled["a"] = None
    driver.run()
    assert grammars.released == ["a"]


def test_a_token_that_the_grammar_does_not_allow_ends_the_request_and_never_leaves() -> None:
    right = reference_tokens(PROMPT, 3, eos=-1)
    grammars = FakeGrammars(forbidden=right[1])
    driver = Driver(make_scheduler(structured_output=grammars))
    driver.scheduler.add_request(make_request("a", PROMPT, structured_output=JSON, max_tokens=3, ignore_eos=True))
    grammars.compiled["a"] = None
    driver.run()
    assert driver.tokens_of("a") == right[:1]
    assert driver.end_of("a").error == "the grammar does not allow it"


def test_a_resumed_requests_matcher_goes_through_the_tokens_that_it_has() -> None:
    grammars = FakeGrammars()
    driver = Driver(make_scheduler(structured_output=grammars))
    right = reference_tokens(PROMPT, 4, eos=-1)
    driver.scheduler.add_request(
        make_request("a", PROMPT, structured_output=JSON, max_tokens=4, ignore_eos=True, output_token_ids=right[:2])
    )
    grammars.compiled["a"] = None
    driver.run()
    assert grammars.tokens["a"] == right


def test_a_consumers_matcher_goes_through_the_producers_token() -> None:
    right = reference_tokens(PROMPT, 3, eos=-1)
    grammars, connector = FakeGrammars(), FakeConnector()
    driver = Driver(make_scheduler(structured_output=grammars, connector=connector))
    request = make_request(
        "c", PROMPT, structured_output=JSON, max_tokens=3, ignore_eos=True, role=TransferRole.CONSUMER
    )
    driver.scheduler.add_request(request)
    grammars.compiled["c"] = None
    driver.step()
    driver.worker.write(connector.loading["c"].block_ids, request.all_token_ids, 0, 6)
    driver.step(output_of(finished_recving={"c": loaded(6, right[0])}))
    driver.run()
    assert grammars.tokens["c"] == right


def test_a_grammar_never_runs_ahead_of_its_tokens() -> None:
    grammars = FakeGrammars()
    scheduler = make_scheduler(structured_output=grammars, overlap=True)
    driver = Driver(scheduler)
    scheduler.add_request(make_request("a", PROMPT, structured_output=JSON, max_tokens=5, ignore_eos=True))
    grammars.compiled["a"] = None
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 6}
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(first, driver.worker.execute(first))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_an_engine_without_a_compiler_refuses_grammars() -> None:
    driver = Driver(make_scheduler())
    driver.scheduler.add_request(make_request("a", 4, structured_output=JSON))
    driver.run()
    assert driver.end_of("a").error == "the request needs structured output, which this engine does not have"


@pytest.mark.parametrize("fairness", ["none", "ingress", "tenant"])
def test_requests_whose_grammars_are_compiled_come_back_to_the_places_of_their_arrival(fairness: Any) -> None:
    """In whichever order they are compiled, and whoever has come since."""
    grammars = FakeGrammars()
    scheduler = make_scheduler(num_blocks=2, structured_output=grammars, fairness=fairness)
    scheduler.add_request(make_request("running", 4, max_tokens=4))
    step = scheduler.schedule()
    for name in ("first", "second"):
        scheduler.add_request(make_request(name, 4, structured_output=JSON))
        scheduler.add_request(make_request(f"after {name}", 4))
    grammars.compiled["second"] = None
    scheduler.preparation.proceed(1000.0)
    grammars.compiled["first"] = None
    scheduler.preparation.proceed(1000.0)
    assert [r.request_id for r in scheduler.waiting] == ["first", "after first", "second", "after second"]
    assert step.num_scheduled_tokens == {"running": 4}
