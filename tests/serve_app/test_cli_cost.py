"""``tandem cost``."""

import pytest

from serve_app.cli import main

EXERCISE = (
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
def test_the_exercise_and_what_flips_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deadline_s: int, code: int, said: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tandem", "cost", *EXERCISE.split(), "--deadline-s", str(deadline_s)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert all(part in text for part in said), text
