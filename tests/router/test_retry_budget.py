"""Retries stay a share of the requests."""

from router.retry_budget import RetryBudget


def test_a_fifth_of_the_requests_may_be_tried_again() -> None:
    budget = RetryBudget(share_frac=0.2, most=10.0)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    taken = 0
    for _ in range(1000):
        budget.request()
        taken += budget.take()
    assert taken in (199, 200)


def test_unused_retries_are_kept_only_up_to_the_reserve() -> None:
    budget = RetryBudget(share_frac=0.2, most=3.0)
    for _ in range(1000):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == 3
