"""The learned bandwidth of a group's link."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.links import Links, with_window
from autoscale.engines.profile import EngineProfile, Link
from autoscale.policies.default import Default, DefaultConfig
from autoscale.policies.token_velocity import TokenVelocity, TokenVelocityConfig, network_velocity
from autoscale.ratio import PdRatio
from autoscale.sim.scenario import run_policy
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Snapshot, Traffic
from kvtransfer.topology import LinkTier, Role
from tests.autoscale.sim.conftest import KEYS, PROFILE, make_scenario

MakeSnapshot = Callable[..., Snapshot]
MakeProfile = Callable[..., EngineProfile]
D = Role.DECODE
WINDOW_S = 20.0


def pulling(make_snapshot: MakeSnapshot, now_s: float, bytes_per_s: float | None) -> Snapshot:
    """Two decode replicas that pull KV; ``None``: nothing."""
    pulls = {} if bytes_per_s is None else {"pull_bytes_per_s": bytes_per_s}
    return make_snapshot(1, 2, now_s=now_s, stats={D: pulls})


def test_one_window_after_the_other_is_remembered_and_the_fastest_counts(make_snapshot: MakeSnapshot) -> None:
    links: Links = {}
    seen = {0.0: 4e9, 5.0: 9e9, 20.0: 5e9, 40.0: None, 60.0: 3e9}  # 5 s after a window no other one has passed
    for at_s, bytes_per_s in seen.items():
        links = with_window(links, pulling(make_snapshot, at_s, bytes_per_s), WINDOW_S)
    assert links == {"g0": ((0.0, 4e9), (20.0, 5e9), (60.0, 3e9))}
    assert ControllerState(links=links).link_bytes_per_s == 5e9
    for number in range(9):  # a link that has become slower: after nine windows
        links = with_window(links, pulling(make_snapshot, 80.0 + 20.0 * number, 1e9), WINDOW_S)
    assert ControllerState(links=links).link_bytes_per_s == 1e9


def test_the_slowest_group_counts_and_a_clock_that_was_set_back_forgets_the_future(make_snapshot: MakeSnapshot) -> None:
    links = {"fast": ((10.0, 9e9),), "slow": ((10.0, 2e9),)}
    assert ControllerState(links=links).link_bytes_per_s == 2e9
    assert with_window({"g0": ((5000.0, 9e9),)}, make_snapshot(now_s=1000.0), WINDOW_S) == {}
    assert ControllerState().link_bytes_per_s is None


def test_policies_take_the_observed_link_and_name_a_drift(
    make_profile: MakeProfile, make_snapshot: MakeSnapshot
) -> None:
    profile = make_profile()
    configured = profile.handoff.bytes_per_s
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=90.0, output_tokens_mean=20.0)
    state = ControllerState(links={"g0": ((1.0, configured / 4),)})
    config = TokenVelocityConfig(prefill=profile, decode=profile)
    learned = config.with_observed(state)
    assert network_velocity(learned.prefill) == pytest.approx(network_velocity(profile) / 4)
    decision = TokenVelocity(config, ratio=PdRatio(1, 1), slo=SloConfig()).decide(
        make_snapshot(traffic=traffic, state=state)
    )
    assert "KV is pulled at" in decision.reason
    (shown,) = (each for each in decision.shown if each.name == "link_bytes_per_s")
    assert (shown.value, shown.target) == (pytest.approx(configured / 4), configured)


def test_an_observed_link_is_held_against_the_profiles_link_if_it_has_one(
    make_profile: MakeProfile, make_snapshot: MakeSnapshot
) -> None:
    """A handoff is slower than its transfer: the bandwidth of pulls alone would seem to have drifted from it."""
    handoff = make_profile().handoff
    link = Link(base_s=0.0, bytes_per_s=4 * handoff.bytes_per_s)
    profile = make_profile().model_copy(update={"link": link})
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=90.0, output_tokens_mean=20.0)
    state = ControllerState(links={"g0": ((1.0, 4 * handoff.bytes_per_s),)})
    policy = TokenVelocity(TokenVelocityConfig(prefill=profile, decode=profile), ratio=PdRatio(1, 1), slo=SloConfig())
    decision = policy.decide(make_snapshot(traffic=traffic, state=state))
    assert "KV is pulled at" not in decision.reason
    (shown,) = (each for each in decision.shown if each.name == "link_bytes_per_s")
    assert shown.target == link.bytes_per_s


def test_the_share_across_switches_holds_until_kv_was_pulled(
    make_profile: MakeProfile, make_snapshot: MakeSnapshot
) -> None:
    """A load that the link alone decides: many prompts, and one output token each."""
    profile = make_profile()
    slow = profile.model_copy(update={"handoff": profile.handoff.model_copy(update={"bytes_per_s": 1e3})})
    policy = Default(DefaultConfig(prefill=profile, decode=slow), ratio=PdRatio(1, 1), slo=SloConfig())
    traffic = Traffic(requests_per_s=50.0, served_per_s=50.0, input_tokens_mean=90.0, output_tokens_mean=1.0)

    def wanted(state: ControllerState, tier: LinkTier) -> float:
        seen = make_snapshot(traffic=traffic, state=state)
        pools = tuple(replace(pool, limits=replace(pool.limits, link_tier=tier)) for pool in seen.pools)
        decision = policy.decide(replace(seen, pools=pools))
        assert decision.wanted is not None
        return decision.wanted[D]

    observed = ControllerState(links={"g0": ((1.0, 1e3),)})
    near, far = wanted(ControllerState(), LinkTier.S1), wanted(ControllerState(), LinkTier.S2)
    assert far > 1.1 * near
    assert wanted(observed, LinkTier.S2) == pytest.approx(near)


@pytest.mark.parametrize("link_frac", [1.0, 0.4])
def test_after_ten_simulated_minutes_the_learned_link_is_within_15_percent(link_frac: float) -> None:
    """The links of the replicas reach a part of what the profile says, at a load that has many pulls at a time."""
    rng, at_s, arrivals = random.Random(5), 0.0, []
    while at_s < 600.0:
        arrivals.append((at_s, 2000, 100))
        at_s += rng.expovariate(12.0)
    config = AutoscaleConfig.model_validate({"policy": {"kind": "static", "prefill": 4, "decode": 3}})
    run = run_policy(
        replace(make_scenario(arrivals, highest=32), link_frac=link_frac), config, {KEYS[Role.PREFILL]: 4, KEYS[D]: 3}
    )
    handoff = PROFILE.handoff
    assert run.plans[-1][1].state.link_bytes_per_s == pytest.approx(link_frac * handoff.bytes_per_s, rel=0.15)


@pytest.mark.parametrize(("prefill", "decode", "is_known"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_the_link_of_a_group_without_replicas_is_forgotten(
    make_snapshot: MakeSnapshot, prefill: int, decode: int, is_known: bool
) -> None:
    """Its next replicas may be on other nodes."""
    links = {"g0": ((900.0, 9e9),), "gone": ((900.0, 1e9),)}
    after = with_window(links, make_snapshot(prefill, decode), WINDOW_S)
    assert after == ({"g0": ((900.0, 9e9),)} if is_known else {})
