"""``tandem cost``: what a model with few calls costs (Exercise 23.4.3 of the queue-depth chapter)."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.cost import Budget, cold_start_budget, start_hosts
from serve_app.cli.main import main

EXERCISE: dict[str, float] = {
    "calls_per_hour": 3.0,
    "call_s": 0.0,
    "deadline_s": 300.0,
    "replica_cost_per_hour": 3.0,
    "cold_start_s": 90.0,
    "warm_start_s": 12.0,
    "pool_cost_per_hour": 1.0,
}


def budget(**changes: float) -> Budget:
    return cold_start_budget(**{**EXERCISE, **changes})


def cost(of: Budget) -> dict[str, float]:
    return {option.name: option.cost_per_day for option in of.options}


def test_the_exercise_of_the_chapter_by_hand() -> None:
    found = budget()
    # A replica runs for 90 s of every 90 s + 20 min; from the pool it runs for 12 s, and the pool costs 24 dollars.
    expected = {
        "always on": 72.0,
        "from zero": 72.0 * 90.0 / 1290.0,
        "from a warm pool": 24.0 + 72.0 * 12.0 / 1212.0,
    }
    assert cost(found) == pytest.approx(expected)
    assert found.calls_in_system == pytest.approx(3 * 90 / 3600)  # L = lambda W: one replica suffices
    assert found.choice is not None and found.choice.name == "from zero"


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({"deadline_s": 89.0}, "from a warm pool"),  # a cold start takes 90 s
        ({"deadline_s": 11.0}, "always on"),
        ({"deadline_s": 60.0, "pool_cost_per_hour": 3.0}, "always on"),
        ({"call_s": 10.0, "deadline_s": 9.0}, None),
    ],
)
def test_a_shorter_deadline_changes_the_choice(changes: dict[str, float], choice: str | None) -> None:
    found = budget(**changes).choice
    assert (None if found is None else found.name) == choice


def simulated_hours(calls_per_hour: float, call_s: float, start_s: float, idle_s: float) -> float:
    """The share of time in which a replica runs, from 200,000 random calls."""
    rng, now_s, here_s, until_s = random.Random(1), 0.0, 0.0, 0.0
    for _ in range(200_000):
        now_s += rng.expovariate(calls_per_hour / 3600.0)
        if now_s >= until_s:  # no replica runs: a start, then this call, then the idle time
            here_s += start_s + call_s + idle_s
            until_s = now_s + start_s + call_s + idle_s
        elif now_s + call_s + idle_s > until_s:
            here_s += now_s + call_s + idle_s - until_s
            until_s = now_s + call_s + idle_s
    return here_s / now_s


@pytest.mark.parametrize(
    ("calls_per_hour", "call_s", "start_s", "idle_s"),
    [(3, 20, 0, 0), (30, 20, 0, 60), (60, 5, 0, 120), (2, 30, 10, 300)],
)
def test_the_formula_gives_the_cost_of_a_simulation(
    calls_per_hour: float, call_s: float, start_s: float, idle_s: float
) -> None:
    found = budget(calls_per_hour=calls_per_hour, call_s=call_s, cold_start_s=start_s, idle_s=idle_s)
    share = simulated_hours(calls_per_hour, call_s, start_s, idle_s)
    # The formula leaves out calls that come while a replica starts; that is 2 % of the last case.
    assert cost(found)["from zero"] == pytest.approx(72.0 * share, rel=0.03)


def test_always_on_costs_as_much_at_the_rate_at_which_the_choice_changes() -> None:
    at = budget(call_s=20.0, deadline_s=100.0).always_on_from_per_hour  # the warm pool is in time, a cold start is not
    assert at is not None
    assert cost(budget(call_s=20.0, calls_per_hour=at))["from a warm pool"] == pytest.approx(72.0)
    assert budget(call_s=20.0).always_on_from_per_hour is None  # beyond the 180 calls that one replica serves
    assert budget(deadline_s=1.0).always_on_from_per_hour == 0.0


def test_without_calls_only_the_pool_costs() -> None:
    assert cost(budget(calls_per_hour=0.0)) == {"always on": 72.0, "from zero": 0.0, "from a warm pool": 24.0}


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", [*EXERCISE, "idle_s"])
def test_a_wrong_number_is_refused_by_name(name: str, wrong: float) -> None:
    fields: dict[str, Any] = {**EXERCISE, name: wrong}
    with pytest.raises(ValueError, match=f"{name} is .*: give a number of at least 0"):
        cold_start_budget(**fields)


OPTIONS = (
    "--calls-per-hour 3 --call-s 20 --replica-cost-per-hour 3 --cold-start-s 90 --warm-start-s 12 "
    "--pool-cost-per-hour 1"
)


@pytest.mark.parametrize(
    ("deadline_s", "code", "said"),
    [
        (
            300,
            0,
            ["72.00", "6.05", "choose from zero", "at least 110 s", "never cheaper, as long as one replica suffices"],
        ),
        (100, 0, ["choose from a warm pool", "at least 32 s", "always on is cheapest from 162 calls per hour on"]),
        (10, 1, ["no way meets a deadline of 10 s: a call alone takes 20 s"]),
        (-1, 1, ["deadline_s is -1.0: give a number of at least 0"]),
    ],
)
def test_the_command_says_what_to_choose_and_what_would_change_the_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deadline_s: int, code: int, said: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tandem", "cost", *OPTIONS.split(), "--deadline-s", str(deadline_s)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert all(part in text for part in said), text


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str) -> str:
    monkeypatch.setattr("sys.argv", ["tandem", "cost", *options.split()])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


UNTIMED = "--calls-per-hour 3 --call-s 20 --deadline-s 300 --replica-cost-per-hour 3 --pool-cost-per-hour 1"


def test_the_starts_of_a_measurement_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = tmp_path / "starts.json"
    measured.write_text('{"seconds": {"cold": [70, 90, 95], "start host": [11, 12, 40]}}')
    text = run(monkeypatch, capsys, f"{UNTIMED} --starts {measured}")
    assert "90 s" in text and "12 s" in text and "choose from zero" in text
    assert "7 s" in run(monkeypatch, capsys, f"{UNTIMED} --starts {measured} --warm-start-s 7")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{}", "has no times of 'cold'"),
        ('{"seconds": {"cold": []}}', "has no times of 'cold'"),
        ('{"seconds": {"cold": [1]}}', "has no times of 'start host'"),
        ("[1]", "expected the figures of make bench-starts"),
    ],
)
def test_a_measurement_without_starts_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str | None,
    said: str,
) -> None:
    measured = tmp_path / "starts.json"
    if content is not None:
        measured.write_text(content)
    assert said in run(monkeypatch, capsys, f"{UNTIMED} --starts {measured}")


def test_a_start_without_a_time_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--cold-start-s is missing: give it, or give --starts" in run(monkeypatch, capsys, UNTIMED)


def test_a_sleeping_engine_pays_for_what_it_reserves_and_wakes_soon() -> None:
    found = budget(deadline_s=10.0, sleeping_cost_per_hour=0.75, wake_s=2.0)
    assert cost(found)["engine asleep"] == 18.0
    assert found.choice is not None and found.choice.name == "engine asleep"
    assert "engine asleep" not in cost(budget())


@pytest.mark.parametrize("name", ["sleeping_cost_per_hour", "wake_s"])
def test_a_wrong_number_for_a_sleeping_engine_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1.0"):
        budget(**{"sleeping_cost_per_hour": 1.0, "wake_s": 1.0, name: -1.0})


def test_starts_from_the_pool_are_calls_that_find_no_replica() -> None:
    # One cycle: a start of 12 s, and 20 min until the next call.
    assert budget().pool_starts_per_hour == pytest.approx(3600.0 / 1212.0)


def test_start_hosts_by_hand() -> None:
    # One host is away in the mean: with n hosts, 1 / n! over the sum of 1 / k! for k from 0 to n find none.
    shares = {n: 1 / math.factorial(n) / sum(1 / math.factorial(k) for k in range(n + 1)) for n in range(1, 7)}
    fewest = min(n for n, share in shares.items() if share <= 0.01)
    assert start_hosts(60.0, 60.0) == (fewest, pytest.approx(shares[fewest]))
    assert start_hosts(0.0, 60.0) == (1, 0.0)
    assert start_hosts(3.0, 0.0) == (1, 0.0)


def test_start_hosts_of_random_starts() -> None:
    hosts, share = start_hosts(120.0, 60.0)
    rng, now_s, away_until_s, missed, starts = random.Random(2), 0.0, list[float](), 0, 200_000
    for _ in range(starts):
        now_s += rng.expovariate(120.0 / 3600.0)
        away_until_s = [until_s for until_s in away_until_s if until_s > now_s]
        if len(away_until_s) == hosts:
            missed += 1
        else:
            away_until_s.append(now_s + 60.0)
    assert missed / starts == pytest.approx(share, rel=0.15)  # 700 misses


@pytest.mark.parametrize(
    ("starts_per_hour", "refill_s", "words"),
    [(3.0, -1.0, "refill-s is -1.0"), (1e12, 60.0, "too many for start hosts")],
)
def test_a_number_that_start_hosts_cannot_answer_is_refused(
    starts_per_hour: float, refill_s: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        start_hosts(starts_per_hour, refill_s)


def test_the_command_shows_sleeping_engines_and_start_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = tmp_path / "starts.json"
    measured.write_text(
        '{"seconds": {"cold": [90], "start host": [12], "sleeping, level 1": [0.5, 0.7, 0.9], '
        '"staged": [70], "sleeping, level 2": [3]}}'
    )
    text = run(monkeypatch, capsys, f"{UNTIMED} --starts {measured} --sleeping-cost-per-hour 0.75 --models 40")
    assert "engine asleep 18.00 0.7 s yes" in text
    assert "40 such models need 7 start hosts on one node" in text
    options = f"{UNTIMED} --starts {measured} --sleeping-cost-per-hour 0.75 --models 40 --nodes 4"
    assert "40 such models need 4 start hosts on each of 4 nodes" in run(monkeypatch, capsys, options)
    text = run(monkeypatch, capsys, f"{options} --staged --level 2")
    assert "70 s" in text and "3 s yes" in text
    assert "--wake-s is given without" in run(monkeypatch, capsys, f"{UNTIMED} --starts {measured} --wake-s 1")
    text = run(monkeypatch, capsys, f"{UNTIMED} --cold-start-s 90 --warm-start-s 12 --sleeping-cost-per-hour 1")
    assert "--wake-s is missing" in text
