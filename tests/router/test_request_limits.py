"""How much one key may take, and when it may take more."""

from router.admission_config import AdmissionConfig
from router.request_limits import RequestLimits


def limits(replicas: int = 1, **of_key: float) -> RequestLimits:
    return RequestLimits(AdmissionConfig.model_validate({"keys": {"a": of_key}}), replicas)


def test_requests_in_a_minute_are_limited_for_each_key() -> None:
    of = limits(requests_per_minute=60)
    assert all(of.enter("a", 1, 0.0) is None for _ in range(10))
    over = of.enter("a", 1, 0.0)
    assert over is not None
    assert over.retry_after_s == 1.0
    assert "requests of this key come faster than 60 a minute" in over.message
    assert of.enter("b", 1, 0.0) is None
    assert of.enter("a", 1, 1.0) is None
    assert of.enter("a", 1, 1.5) is not None


def test_a_request_whose_body_is_refused_counts_too() -> None:
    of = limits(requests_per_minute=60)
    for _ in range(10):
        assert of.refuse_key("a", 0.0) is None
        of.body_refused("a", 0.0)
    assert of.refuse_key("a", 0.0) is not None
    assert of.refuse_key("b", 0.0) is None


def test_rates_are_shared_out_among_the_replicas() -> None:
    of = limits(5, requests_per_minute=60)
    taken = sum(of.enter("a", 1, second / 10) is None for second in range(601))
    assert 13 <= taken <= 14  # the burst, and a fifth of 60


def test_prompts_and_answers_use_up_the_tokens_of_a_key() -> None:
    of = limits(tokens_per_minute=600)
    assert of.enter("a", 5000, 0.0) is None  # a prompt larger than the burst
    over = of.enter("a", 1, 0.0)
    assert over is not None
    assert over.retry_after_s == 60.0  # the longest time that a refusal names
    assert of.enter("a", 1, 490.0) is not None
    assert of.enter("a", 1, 490.2) is None  # 5,000 tokens less the burst of 100, and 1 more, at 10 a second
    of.spend("a", 100)
    assert of.enter("a", 1, 492.0) is not None


def test_requests_at_a_time_are_limited() -> None:
    of = limits(max_requests=2)
    assert [of.enter("a", 1, 0.0) for _ in range(2)] == [None, None]
    assert of.enter("a", 1, 0.0) is not None
    of.leave("a")
    assert of.enter("a", 1, 0.0) is None


def test_the_cost_of_an_unanswered_request_is_given_back() -> None:
    of = limits(requests_per_minute=6, tokens_per_minute=600)
    assert of.enter("a", 5000, 0.0) is None
    assert of.enter("a", 1, 0.0) is not None
    of.leave("a")
    of.refund("a", 5000)
    assert of.enter("a", 5000, 0.0) is None


def test_a_slow_rate_lets_one_whole_request_through_at_a_time() -> None:
    """At 3 requests a minute the burst of 10 s is half a request."""
    slow = limits(requests_per_minute=3)
    assert slow.enter("a", 1, 0.0) is None
    assert slow.enter("a", 1, 19.0) is not None
    assert slow.enter("a", 1, 20.0) is None
