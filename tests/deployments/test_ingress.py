"""What the endpoint makes of a body before a decode replica has looked at it."""

from typing import Any

import pytest

from router.admission import Priority

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("body", "most_output_tokens", "answers"),
    [
        ({"max_tokens": 5, "n": 3}, 5, 3),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7, 1),
        ({"max_tokens": -(10**400), "n": -(10**400)}, None, 1),
        ({"max_tokens": 10**400, "n": 10**400}, 10**400, 10_000),
        ({"max_tokens": "5", "n": "3"}, None, 1),
        ({"max_tokens": 0, "n": 0}, None, 1),
        ({}, None, 1),
    ],
)
def test_admission_hears_only_numbers_that_make_sense(
    body: dict[str, Any], most_output_tokens: int | None, answers: int
) -> None:
    from deployments.ingress import _place
    from router.admission import Admission, AdmissionConfig

    place = _place({"prompt": "x", **body}, 100, None, Priority.NORMAL)
    assert (place.tokens, place.most_output_tokens, place.answers) == (25, most_output_tokens, answers)
    admission = Admission(AdmissionConfig(ttft_s=1.0), replicas=1, prefill_replicas=1, now_s=0.0)
    assert admission.arrive(place, 0.0) is None
    assert admission.passed(0.0) == [place]
