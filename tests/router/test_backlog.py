"""What a decode replica believes waits on prefill."""

from router.backlog import PrefillBacklog


def test_backlog_is_own_prompts_per_replica_or_a_fresh_longer_report() -> None:
    backlog = PrefillBacklog()
    assert backlog.tokens(0.0) == 0
    for tokens in (100, 300):
        backlog.sent(tokens)
    assert backlog.tokens(0.0) == 400
    backlog.answered(100, "a", 5000, 0.0)
    assert backlog.tokens(0.0) == 5000
    assert backlog.tokens(1.5) == 300  # the report is stale, and the replica is still one that was seen
    backlog.failed(300)
    assert backlog.tokens(1.5) == 0


def test_own_prompts_are_spread_over_the_replicas_seen_in_the_last_minute() -> None:
    backlog = PrefillBacklog()
    for name, at_s in (("a", 0.0), ("b", 30.0)):
        backlog.sent(100)
        backlog.answered(100, name, 0, at_s)
    backlog.sent(600)
    assert backlog.tokens(40.0) == 300
    assert backlog.tokens(70.0) == 600
