"""When a decode replica has credit for the KV of one more prompt."""

from router.kv_credit import KvCredit


def is_enough(credit: KvCredit, tokens: int, usage_frac: float = 0.5) -> bool:
    return credit.is_enough(tokens, kv_tokens=10_000, kv_usage_frac=usage_frac)


def test_free_kv_minus_promises_is_the_limit() -> None:
    credit = KvCredit()
    assert is_enough(credit, 5000) and not is_enough(credit, 5001)
    credit.promise("a", 3000)
    assert is_enough(credit, 2000) and not is_enough(credit, 2001)
    assert not is_enough(credit, 1, usage_frac=0.7)


def test_kv_that_answers_free_until_then_counts_by_hand() -> None:
    # Prefill takes 2 s and an answer 20 s, so a tenth of the 5,000 tokens in use will be free: 5,500 tokens.
    credit = KvCredit()
    credit.observe_prefill(2.0)
    credit.begin("old", 100.0)
    credit.end("old", 120.0)
    assert is_enough(credit, 5500) and not is_enough(credit, 5501)


def test_all_kv_in_use_is_free_at_most_once() -> None:
    credit = KvCredit()
    credit.observe_prefill(50.0)
    credit.begin("old", 0.0)
    credit.end("old", 5.0)
    assert is_enough(credit, 10_000) and not is_enough(credit, 10_001)


def test_a_promise_ends_with_the_first_token_or_without_one_and_only_once() -> None:
    credit = KvCredit()
    for end in (credit.withdraw, lambda name: credit.begin(name, 1.0), lambda name: credit.end(name, 1.0)):
        credit.promise("a", 5000)
        assert not is_enough(credit, 1)
        assert end("a") and not end("a")
        assert is_enough(credit, 5000)


def test_a_promise_that_is_made_again_counts_once() -> None:
    credit = KvCredit()
    credit.promise("a", 2000)
    credit.promise("a", 3000)
    assert is_enough(credit, 2000) and not is_enough(credit, 2001)


def test_an_engine_that_does_not_tell_its_kv_gives_credit_to_every_prompt() -> None:
    assert KvCredit().is_enough(10**9, kv_tokens=0, kv_usage_frac=1.0)
