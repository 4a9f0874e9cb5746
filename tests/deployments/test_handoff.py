"""What decode and prefill say to each other."""

import pickle

from deployments.handoff import PrefillRequest, PrefillResult


def test_request_weighs_its_prompt() -> None:
    assert PrefillRequest(request_id="r", token_ids=[5, 6, 7]).work_tokens == 3


def test_both_survive_the_way_between_processes() -> None:
    request = PrefillRequest(request_id="r", token_ids=[5, 6], cache_salt="s", priority=2)
    result = PrefillResult(
        kv_transfer_params={"remote_port": 20000}, answered_at_s=1.0, backlog_tokens=7, replica_id="p0"
    )
    assert pickle.loads(pickle.dumps(request)) == request
    assert pickle.loads(pickle.dumps(result)) == result
