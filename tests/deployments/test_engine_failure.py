"""Why an engine did not start, out of the log that it shares with its replica."""

from deployments.engine_failure import raised_in_engine

LOG = """\
(EngineCore pid=17) INFO 11-21 10:15:30 [core.py:99] ValueError: not a line of the traceback
(EngineCore pid=17) Traceback (most recent call last):
(EngineCore pid=17)     raise ValueError(
(EngineCore pid=17) ValueError: To serve at least one request, 0.02 GiB is needed
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_engine_core_s_own_exception_is_the_cause() -> None:
    assert raised_in_engine(LOG) == "ValueError: To serve at least one request, 0.02 GiB is needed"


def test_the_last_start_counts_and_dotted_names_do() -> None:
    again = LOG + "(Worker pid=18) torch.OutOfMemoryError: tried to allocate 2 GiB\n"
    assert raised_in_engine(again) == "torch.OutOfMemoryError: tried to allocate 2 GiB"


def test_a_log_without_an_engine_names_nothing() -> None:
    assert raised_in_engine("RuntimeError: Engine core initialization failed.\n") is None
