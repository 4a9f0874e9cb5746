"""Each stage needs those before it, and says so at once."""

from collections.abc import Callable

import pytest

from autoscale.decide.controller import STAGES
from autoscale.decide.draft import Draft, emit
from autoscale.decide.reconcile import reconcile

MakeDraft = Callable[..., Draft]


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.__name__)
def test_a_stage_fails_without_the_stages_before_it(make_draft: MakeDraft, stage: Callable[[Draft], None]) -> None:
    with pytest.raises(AttributeError):
        stage(make_draft(reconcile))


def test_a_draft_without_its_stages_is_no_plan(make_draft: MakeDraft) -> None:
    with pytest.raises(AttributeError):
        emit(make_draft(reconcile))
