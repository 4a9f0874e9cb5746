"""What the prefill queue observes of its own load."""

import pytest

from router.prefill_load import PrefillLoad


def test_kingmans_wait_by_hand() -> None:
    # Prompts of 100 and 300 tokens in turn, one each second, each 0.8 s on one replica: E[S] = 0.8 s, rho = 0.8.
    # Lengths: mean 200, variance 10,000, so c_s^2 = 0.25; equal gaps, so c_a^2 = 0. W_q = 0.8 / 0.2 x 0.125 x 0.8 s.
    load = PrefillLoad()
    for second in range(100):
        load.arrive(100 if second % 2 else 300, float(second))
        load.pass_time(0, 1, float(second))
        load.pass_time(1, 1, second + 0.8)
        load.compute()
    assert load.input_tokens_mean == pytest.approx(200.0)
    assert load.wait_s == pytest.approx(0.8 / 0.2 * 0.125 * 0.8)


def test_two_replicas_count_as_one_of_twice_the_speed() -> None:
    # As above, but each prompt takes 1.6 s on one of two replicas, both are always 80 % busy.
    load = PrefillLoad()
    for second in range(100):
        load.arrive(100 if second % 2 else 300, float(second))
        load.pass_time(0, 2, float(second))
        load.pass_time(2, 2, second + 0.8)
        load.compute()
    assert load.wait_s == pytest.approx(0.8 / 0.2 * 0.125 * 0.8)


def test_before_a_prompt_has_been_computed_no_wait_is_known() -> None:
    load = PrefillLoad()
    assert (load.input_tokens_mean, load.wait_s) == (0.0, 0.0)
    load.arrive(100, 0.0)
    load.arrive(200, 1.0)
    assert (load.input_tokens_mean, load.wait_s) == (150.0, 0.0)


def test_the_wait_stays_finite_above_full_load() -> None:
    load = PrefillLoad()
    for second in range(50):
        load.arrive(100 + 100 * (second % 2), float(second))
        load.pass_time(1, 1, float(second))
        load.compute()
        load.pass_time(5, 1, float(second))
    assert 0.0 < load.wait_s < 20.0


def test_the_mean_length_follows_a_change_within_some_hundred_prompts() -> None:
    load = PrefillLoad()
    for second in range(300):
        load.arrive(1000, float(second))
    for second in range(300, 800):
        load.arrive(100, float(second))
    assert load.input_tokens_mean == pytest.approx(100.0, rel=0.1)
