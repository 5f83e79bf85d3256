import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.costs.recent_load import RecentRates
from cluster.routing.costs.role_memory import RoleMemory
from cluster.routing.costs.steady_load import choose_role_use
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.decision import RoleChoice, RoleUse
from cluster.routing.reported_work import EngineWork
from tests.cluster.routing.cost_setup import COEFFICIENTS

_STEPS = StepPrediction(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
_AIM_S = 0.02


def _engine(slowness: float = 1.0, bytes_per_s: float = 0.0, max_num_seqs: int = 0, num_blocks: int = 0) -> EngineWork:
    costs = [slowness * one for one in COEFFICIENTS]
    return EngineWork(
        ("engine", 1),
        StepPrediction(costs, costs, costs),
        kv_bytes_per_token=1e5,
        most_bytes_per_s=bytes_per_s,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
    )


def _offered(per_s: float, computed: float = 512, prompt: float = 2048, output: float = 128) -> RecentRates:
    return RecentRates(per_s, per_s * computed, per_s * prompt, per_s * output)


def _choose(
    offered: RecentRates, prefill: int = 1, decode: int = 1, itl_s: float = _AIM_S, ttft_s: float | None = None
) -> RoleChoice:
    return choose_role_use(offered, [_engine()] * prefill, [_engine()] * decode, itl_s, ttft_s)


def _most(is_met: Callable[[float], bool]) -> float:
    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def _itl_of_nine_of_ten_s(per_s: float, computed: float, output: float, num_engines: int) -> float:
    """Iterate Little's law from an empty engine: as many decode as come in the time of an answer.

    To the mean come what nine of ten are above it: deviations of the busy period that prompts make of an answer, and
    of how many decode at a time.
    """
    context, size = 2048 + output / 2, min(2048, 8 * computed)
    itl_s, num_decodes, step_s, prompt_s, added_s = _STEPS.decode_step_s(0, 0), 1.0, 0.0, 0.0, 0.0
    for _ in range(5000):
        num_decodes = max(per_s * output * itl_s, 1.0)
        step_s = _STEPS.decode_step_s(num_decodes, num_decodes * context)
        if computed:
            steps = _STEPS.prefill_steps(size, 2048 - computed, num_decodes, num_decodes * context, 2048)
            prompt_s, added_s = steps.seconds * computed / size, steps.added_s * computed / size
        if per_s * added_s >= 1 or itl_s > 1:
            return math.inf
        itl_s = step_s / (1 - per_s * added_s)
    rest = 1 - per_s * added_s
    mean_s = itl_s + per_s * added_s * prompt_s / output / rest
    of_prompts_s = added_s / output * math.sqrt(per_s / num_engines * (output * step_s + prompt_s) / rest**3)
    each_s = (step_s - _STEPS.decode_step_s(0, 0)) / num_decodes
    return mean_s + 1.2816 * (of_prompts_s + each_s * math.sqrt(num_decodes * 2 / 3 / num_engines) / rest)


@pytest.mark.parametrize("output", [16.0, 128.0, 1000.0])
def test_the_most_that_engines_decode_is_where_nine_of_ten_keep_the_aim(output: float) -> None:
    found = _choose(_offered(1.0, output=output), prefill=1000)
    most = _most(lambda per_s: _itl_of_nine_of_ten_s(per_s, 0.0, output, 1) <= _AIM_S)
    assert found.kept_per_s == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("computed", [128.0, 512.0, 2048.0])
@pytest.mark.parametrize("num_decode", [1, 7])
def test_without_roles_prompts_lengthen_the_steps_of_those_that_decode(computed: float, num_decode: int) -> None:
    found, count = _choose(_offered(1.0, computed), decode=num_decode), 1 + num_decode
    most = _most(lambda per_s: _itl_of_nine_of_ten_s(per_s, computed, 128.0, count) <= _AIM_S)
    assert found.ignored_per_s == pytest.approx(count * most, rel=0.01)


def test_answers_of_few_tokens_vary_more_and_most_at_few_engines() -> None:
    def of_means(output: float, count: int) -> float:
        """The part of what would keep the aim if all requests met as many prompts and decodes."""
        found = _choose(_offered(1.0, 512, output=output), decode=count - 1).ignored_per_s
        crowd = _choose(_offered(1.0, 512, output=output), decode=999).ignored_per_s
        return found / count / (crowd / 1000)

    assert of_means(16, 2) < of_means(16, 8) < 1
    assert of_means(16, 2) < of_means(128, 2) < 1


@pytest.mark.parametrize("ttft_s", [None, 1.0, 0.4, 0.3])
def test_with_roles_prompts_are_computed_one_after_the_other_and_nine_of_ten_in_time(ttft_s: float | None) -> None:
    found = _choose(_offered(1.0, 2048, 2048), prefill=2, decode=1000, ttft_s=ttft_s)
    prompt_s = _STEPS.prefill_steps(2048, 0, 0, 0, 2048).seconds
    used = 1.0 if ttft_s is None else _most(lambda part: _late_part(part, 2, ttft_s / prompt_s - 1) <= 0.1)
    assert found.kept_per_s == pytest.approx(used * 2 / prompt_s, rel=0.001)


def _late_part(used: float, num_engines: int, room: float) -> float:
    """The part of prompts that wait for more than `room` prompts, by Sakasegawa's approximation."""
    if used > 1:
        return math.inf
    return math.pow(used, math.sqrt(2 * num_engines + 2) - 1) * math.exp(-2 * num_engines * (1 - used) * room)


def test_prompts_that_take_as_long_as_their_aim_are_done_by_nobody_in_time() -> None:
    prompt_s = _STEPS.prefill_steps(2048, 0, 0, 0, 2048).seconds
    found = _choose(_offered(1.0, 2048, 2048), prefill=2, decode=4, ttft_s=prompt_s)
    assert (found.use, found.kept_per_s, found.ignored_per_s) == (RoleUse.WEIGHED, 0.0, 0.0)


def test_what_an_engine_cannot_send_it_need_not_compute() -> None:
    narrow = choose_role_use(_offered(1.0), [_engine(bytes_per_s=1e6)], [_engine()] * 9, _AIM_S)
    assert narrow.kept_per_s == pytest.approx(1e6 / (512 * 1e5), rel=1e-4), "what is cached is not sent"
    wide = choose_role_use(_offered(1.0), [_engine(bytes_per_s=1e12)], [_engine()] * 9, _AIM_S)
    assert wide == _choose(_offered(1.0), decode=9), "as one that was not measured"


@pytest.mark.parametrize("limit", [{"max_num_seqs": 4}, {"num_blocks": 4 * (2048 + 64) // 16}])
def test_a_batch_may_be_full_before_the_aim_is_missed(limit: dict[str, int]) -> None:
    found = choose_role_use(_offered(1.0), [_engine()] * 100, [_engine(**limit)], _AIM_S)
    assert found.kept_per_s == pytest.approx(4 / (128 * _STEPS.decode_step_s(4, 4 * (2048 + 64))), rel=0.01)


def test_a_slow_engine_does_less() -> None:
    even = _choose(_offered(1.0), decode=2)
    slow = choose_role_use(_offered(1.0), [_engine()], [_engine(), _engine(slowness=2.0)], _AIM_S)
    assert slow.ignored_per_s < 0.9 * even.ignored_per_s
    many = choose_role_use(_offered(1.0), [_engine()] * 100, [_engine(), _engine(slowness=2.0)], _AIM_S)
    assert many.kept_per_s < 0.8 * _choose(_offered(1.0), prefill=100, decode=2).kept_per_s


@pytest.mark.parametrize(
    ("computed", "prompt", "output", "itl_s", "better"),
    [
        pytest.param(512, 2048, 100, 0.01, RoleUse.KEPT, id="a tight aim leaves no room for prompts"),
        pytest.param(512, 2048, 500, 0.03, RoleUse.IGNORED, id="a wide aim leaves room for them"),
        pytest.param(2048, 2048, 32, 0.02, RoleUse.KEPT, id="a short answer would be late by one prompt"),
        pytest.param(64, 64, 500, 0.02, RoleUse.IGNORED, id="the engine that decodes has all of the work"),
    ],
)
def test_the_better_state_is_chosen_where_only_it_meets_the_aims(
    computed: float, prompt: float, output: float, itl_s: float, better: RoleUse
) -> None:
    def choose(per_s: float) -> RoleChoice:
        return _choose(_offered(per_s, computed, prompt, output), itl_s=itl_s)

    both = {RoleUse.KEPT: choose(1.0).kept_per_s, RoleUse.IGNORED: choose(1.0).ignored_per_s}
    assert max(both, key=both.__getitem__) is better
    uses = [choose(part * both[better]).use for part in (0.2, 1.0, 4.0)]
    assert uses == [RoleUse.WEIGHED, better, RoleUse.WEIGHED], "below what both do, between, and above both"


def test_roles_are_kept_under_smaller_loads_than_they_are_ignored() -> None:
    """Predictions are guesses under a small load, and optimistic ones where steps mix prompts with decodes."""

    def least_part(better: RoleUse, *sizes: float, itl_s: float) -> float:
        both = _choose(_offered(1.0, *sizes), itl_s=itl_s)
        worse = min(both.kept_per_s, both.ignored_per_s)
        parts = (number / 100 for number in range(1, 101))
        return next(part for part in parts if _choose(_offered(part * worse, *sizes), itl_s=itl_s).use is better)

    assert least_part(RoleUse.KEPT, 512, 512, 64, itl_s=0.6 * _AIM_S) == pytest.approx(0.4, abs=0.02)
    assert least_part(RoleUse.IGNORED, 64, 64, 500, itl_s=0.03) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("slowness", [1.3, 1.5, 1.7])
@pytest.mark.parametrize("per_s", [3, 4, 5, 6, 8, 10, 12, 14, 16, 20])
def test_the_state_does_not_change_as_often_as_the_speed_of_an_engine(slowness: float, per_s: float) -> None:
    """Beside a busy engine on the same machine decode steps take longer, for as long as that one has a prompt."""
    memory, speeds = RoleMemory(), [[_engine()], [_engine(slowness)]]

    def use_at(number: int, memory: RoleMemory | None) -> RoleUse:
        load = _offered(per_s, 512, 512, 64)
        return choose_role_use(load, [_engine()], speeds[number % 2], _AIM_S * 0.6, memory=memory, now_s=number / 2).use

    uses = [use_at(number, memory) for number in range(40)]
    assert sum(one is not other for one, other in itertools.pairwise(uses)) <= 1
    assert use_at(0, None) is use_at(0, RoleMemory())


def test_a_state_is_left_for_one_that_is_better_and_not_for_one_that_may_be() -> None:
    def uses(slowness: Sequence[float]) -> list[RoleUse]:
        memory, load = RoleMemory(), _offered(8, 512, 512, 64)
        decode = [[_engine(one)] for one in slowness]
        choices = [
            choose_role_use(load, [_engine()], one, _AIM_S * 0.6, memory=memory, now_s=number / 2)
            for number, one in enumerate(decode)
        ]
        return [one.use for one in choices]

    assert set(uses([1.0] * 20)) == {RoleUse.KEPT}
    lasting = uses([1.0] * 20 + [3.0] * 20)
    assert lasting[20] is RoleUse.KEPT, "it may be over in a moment"
    assert lasting[-1] is not RoleUse.KEPT


@pytest.mark.parametrize(("quiet_s", "expected"), [(1.0, RoleUse.KEPT), (3.0, RoleUse.WEIGHED)])
def test_the_choice_of_an_old_load_does_not_outlast_a_quiet_time(quiet_s: float, expected: RoleUse) -> None:
    memory = RoleMemory()

    def use_at(now_s: float, part: float) -> RoleUse:
        without_roles = _choose(_offered(1.0, 512, 512, 64), itl_s=0.6 * _AIM_S).ignored_per_s
        load = _offered(part * without_roles, 512, 512, 64)
        return choose_role_use(load, [_engine()], [_engine()], 0.6 * _AIM_S, memory=memory, now_s=now_s).use

    assert {use_at(number / 2, 0.8) for number in range(10)} == {RoleUse.KEPT}
    assert use_at(4.5 + quiet_s, 0.35) is expected, "too small a load to begin to keep roles, and none to cease"


@pytest.mark.parametrize(("prompt", "first"), [(64, RoleUse.IGNORED), (2048, RoleUse.WEIGHED)])
def test_roles_are_ignored_at_the_beginning_of_a_load_only_if_that_is_clearly_better(
    prompt: float, first: RoleUse
) -> None:
    computed, aim_s = min(prompt, 512), 0.03
    most = _choose(_offered(1.0, computed, prompt, 500), itl_s=aim_s).ignored_per_s
    memory, load = RoleMemory(), _offered(most, computed, prompt, 500)
    choices = [
        choose_role_use(load, [_engine()], [_engine()], aim_s, memory=memory, now_s=number / 2) for number in range(6)
    ]
    gain = choices[0].ignored_per_s / choices[0].kept_per_s
    assert gain > (1.15 if first is RoleUse.IGNORED else 1.03)
    assert [one.use for one in choices] == [first] * 4 + [RoleUse.IGNORED] * 2


def test_any_number_of_different_engines_costs_as_much_as_a_few() -> None:
    calls = 0

    class Counted(StepPrediction):
        def decode_step_s(self, num_decodes: float, num_context_tokens: float) -> float:
            nonlocal calls
            calls += 1
            return super().decode_step_s(num_decodes, num_context_tokens)

    def choose(num_kinds: int) -> RoleChoice:
        engines = [_engine(1 + number % num_kinds / 1000) for number in range(160)]
        for one in engines:
            costs = [float(cost) for cost in one.prediction.coefficients[0]] if one.prediction else []
            one.prediction = Counted(costs, costs, costs)
        return choose_role_use(_offered(1.0), engines, engines, _AIM_S)

    few = choose(16)
    calls_of_few, calls = calls, 0
    many = choose(160)
    assert calls == calls_of_few
    assert many.kept_per_s == pytest.approx(few.kept_per_s), "each does as much as the first ones on average"
    assert many.ignored_per_s == pytest.approx(few.ignored_per_s)


def test_without_a_load_nothing_is_chosen() -> None:
    assert choose_role_use(RecentRates(), [_engine()], [_engine()], _AIM_S) == RoleChoice()


def test_an_aim_that_not_even_one_request_meets_is_no_reason_for_either_state() -> None:
    found = _choose(_offered(5.0), itl_s=1e-4)
    assert (found.use, found.kept_per_s, found.ignored_per_s) == (RoleUse.WEIGHED, 0.0, 0.0)


_AMOUNTS = st.floats(0, 1e12, allow_subnormal=False)


@given(
    st.tuples(st.floats(1e-3, 1e9), _AMOUNTS, _AMOUNTS, _AMOUNTS),
    st.floats(1e-6, 100),
    st.integers(1, 4),
    st.integers(0, 512),
)
def test_any_load_has_an_answer(rates: tuple[float, float, float, float], aim_s: float, count: int, most: int) -> None:
    engines = [_engine(max_num_seqs=most, num_blocks=most)] * count
    found = choose_role_use(RecentRates(*rates), engines, engines, aim_s)
    assert 0 <= found.kept_per_s < math.inf
    assert 0 <= found.ignored_per_s < math.inf
