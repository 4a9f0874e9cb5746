"""Places are measured again where their time may be noise, and added where a curve bends."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.form import Place, prompt_terms, step_terms
from autoscale.engines.repeats import between, is_settled
from autoscale.engines.sampling import Survey, form_of

AXIS = (16, 64, 256, 1024, 4096)
SURVEY = Survey(terms=prompt_terms(8192), axis=AXIS, contexts=lambda tokens: (0,))


def straight_s(place: Place) -> float:
    return 0.01 + 1e-4 * place[0]


def surveyed(
    survey: Survey, seconds: Callable[[Place, int], float], limit: int = 400
) -> tuple[dict[Place, list[float]], int]:
    """All times of a survey of an engine, by place and number of the round; and the number of rounds."""
    times: dict[Place, list[float]] = {}
    rounds = 0
    while places := survey.next_places(times):
        rounds += 1
        assert len(places) == len(set(places)) and rounds < limit
        for place in places:
            before = times.setdefault(place, [])
            before.append(seconds(place, len(before)))
    return times, rounds


def test_an_engine_as_the_form_says_takes_two_rounds_of_the_first_places() -> None:
    times, rounds = surveyed(SURVEY, lambda place, _: straight_s(place))
    assert sorted(times) == [(tokens, 0) for tokens in AXIS] and rounds == 2


def test_a_place_that_differs_is_measured_until_its_time_is_that_of_the_form() -> None:
    def slow_twice(place: Place, number: int) -> float:
        return straight_s(place) * (1.8 + number if place[0] == 256 and number < 2 else 1.0)

    times, _ = surveyed(SURVEY, slow_twice)
    assert len(times[256, 0]) == 4  # until two of its times are those of the form
    assert {len(each) for place, each in times.items() if place[0] != 256} == {2}


def test_a_place_whose_times_never_agree_is_measured_six_times() -> None:
    def noisy(place: Place, number: int) -> float:
        return straight_s(place) * (1.5 + 0.3 * number if place[0] == 256 else 1.0)

    times, _ = surveyed(SURVEY, noisy)
    assert len(times[256, 0]) == 6


def test_places_are_added_around_a_jump_and_at_most_two_between_two_of_the_first() -> None:
    axis = tuple(2**power for power in range(4, 13))
    survey = Survey(terms=prompt_terms(8192), axis=axis, contexts=lambda tokens: (0,))
    times, _ = surveyed(survey, lambda place, _: straight_s(place) * (1.5 if 300 < place[0] < 1000 else 1.0))
    # The jumps are at 300 and 1000. 362 is between 256 and 512, 304 between 256 and 362; so with 724 and 861.
    assert sorted(at for at, _ in times if at not in axis) == [304, 362, 724, 861]


def test_a_bump_between_two_of_the_first_places_gets_two_places_and_not_three() -> None:
    axis = tuple(2**power for power in range(4, 13))
    survey = Survey(terms=prompt_terms(8192), axis=axis, contexts=lambda tokens: (0,))
    found_one = {(512, 0): 1.3}  # so that a place is added on its left, which then differs from both neighbours

    def seconds(place: Place, _: int) -> float:
        return straight_s(place) * (1.9 if 300 < place[0] < 480 else found_one.get(place, 1.0))

    times, _ = surveyed(survey, seconds)
    assert len([at for at, _ in times if 256 < at < 512]) == 2


def test_a_bend_at_one_of_the_contexts_adds_the_whole_row() -> None:
    def seconds(place: Place, _: int) -> float:
        batch, context = place
        return (0.01 + 1e-4 * batch + 1e-7 * batch * context) * (1.6 if batch > 10 and context > 500 else 1.0)

    survey = Survey(terms=step_terms, axis=(1, 2, 4, 8, 16, 32), contexts=lambda batch: (64, 1000))
    times, _ = surveyed(survey, seconds)
    added = {at for at, _ in times} - set(survey.axis)
    assert 11 in added and all((at, context) in times for at in added for context in (64, 1000))


def test_one_batch_is_a_survey() -> None:
    survey = Survey(terms=step_terms, axis=(1,), contexts=lambda batch: (64, 500, 4000))
    times, rounds = surveyed(survey, lambda place, _: 0.01 + 1e-7 * place[1])
    assert len(times) == 3 and rounds == 2


@pytest.mark.parametrize(
    ("times", "is_enough"),
    [
        ([], False),
        ([1.0, 1.0], False),
        ([1.0, 1.09, 1.05], True),
        ([1.0, 1.05, 1.11], False),
        ([1.0, 2.0, 1.05, 1.09], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], False),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], True),
    ],
)
def test_three_times_agree_within_a_tenth_or_six_are_enough(times: list[float], is_enough: bool) -> None:
    assert is_settled(times) is is_enough


def test_between_two_numbers_is_one_at_equal_ratios() -> None:
    assert between(16, 1024) == 128
    assert between(2, 4) == 3
    assert between(2, 3) is None and between(7, 7) is None


@given(values=st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40))
def test_any_times_end_in_a_bounded_number_of_places(values: list[float]) -> None:
    times, _ = surveyed(SURVEY, lambda place, number: values[hash((place, number)) % len(values)])
    assert len(times) <= len(AXIS) + 2 * (len(AXIS) - 1)
    assert max(map(len, times.values())) <= 6
    assert all(math.isfinite(form_of(SURVEY.terms, times).seconds(place)) for place in times)
