"""Which adapters are wanted, and which replicas have them."""

from typing import Any

from router.adapters import (
    SILENCE_S,
    AdapterFault,
    AdapterNews,
    AdapterSpec,
    FaultKind,
    HeldAdapters,
    WantedAdapters,
    identity_of,
    name_of,
)

RED = AdapterSpec(name="red", path="/red")


def wanted() -> WantedAdapters:
    return WantedAdapters({"tiny": (RED,), "other": ()}, 100)


def report(replica: str, *, pool: str = "decode:g0", **fields: Any) -> HeldAdapters:
    return HeldAdapters(model="tiny", pool=pool, replica_id=replica, **fields)


def loaded(adapters: WantedAdapters, name: str = "blue", *, is_in_place: bool = False) -> AdapterSpec:
    spec = adapters.want("tiny", name, f"/{name}", is_in_place=is_in_place)
    assert isinstance(spec, AdapterSpec)
    return spec


def kind(fault: AdapterSpec | AdapterFault | None) -> str | None:
    return fault.kind if isinstance(fault, AdapterFault) else None


def test_an_identity_has_the_name_whatever_signs_the_name_has() -> None:
    assert name_of(identity_of("team@home/red", "0a1b")) == "team@home/red"


def test_holders_have_the_name_and_if_asked_for_the_same_files() -> None:
    held = {"decode:g0": {"d0": {"red": "red@1"}, "d1": {"red": "red@2"}, "d2": {}}}
    news = AdapterNews(held=held)
    assert news.holders("decode:g0", "red") == {"d0", "d1"}
    assert news.holders("decode:g0", "red", "red@2") == {"d1"}
    assert news.lacking("decode:g0", "red") == {"d2"}
    assert news.lacking("decode:g0", "red", "red@2") == {"d0", "d2"}
    assert news.identities("decode:g0", "red") == {"red@1", "red@2"}
    assert not news.holders("prefill:g0", "red") | news.lacking("prefill:g0", "red")


def test_only_a_new_report_is_news() -> None:
    adapters = wanted()
    versions = [adapters.version]
    for held in ({}, {}, {"red": "red@1"}, {"red": "red@1"}):
        adapters.report(report("d0", held=held), now_s=0.0)
        versions.append(adapters.version)
    assert versions == [100, 101, 101, 102, 102]


def test_a_silent_replica_is_forgotten() -> None:
    adapters = wanted()
    adapters.report(report("d0"), now_s=0.0)
    adapters.report(report("d1"), now_s=1.0)
    adapters.drop_silent(SILENCE_S + 0.5)
    assert list(adapters.news().held["decode:g0"]) == ["d1"]


def test_a_name_is_taken_by_the_configuration_for_ever_and_by_a_loaded_adapter_unless_in_place() -> None:
    adapters = wanted()
    for model in ("tiny", "other"):
        assert kind(adapters.want(model, "red", "/x", is_in_place=True)) == FaultKind.TAKEN
    first = loaded(adapters)
    assert kind(adapters.want("tiny", "blue", "/x", is_in_place=False)) == FaultKind.TAKEN
    assert kind(adapters.want("other", "blue", "/x", is_in_place=True)) == FaultKind.TAKEN
    assert loaded(adapters, is_in_place=True).revision > first.revision
    assert adapters.news().wanted["tiny"] == (RED, adapters.loaded["tiny"]["blue"])


def test_loaded_adapters_go_and_configured_ones_stay() -> None:
    adapters = wanted()
    loaded(adapters)
    assert [kind(adapters.forget(name)) for name in ("blue", "blue", "red")] == [None, "missing", "fixed"]
    assert adapters.news().wanted == {"tiny": (RED,), "other": ()}


def test_a_try_ends_once_every_replica_of_the_model_has_tried_this_revision() -> None:
    adapters = wanted()
    for replica in ("d0", "d1"):
        adapters.report(report(replica), now_s=0.0)
    adapters.report(HeldAdapters(model="other", pool="decode:g1", replica_id="x0"), now_s=0.0)
    spec = loaded(adapters)
    tried, held = {"blue": spec.revision}, {"blue": "blue@1"}
    adapters.report(report("d0", tried=tried, held=held), now_s=0.0)
    adapters.report(report("d1", tried={"blue": spec.revision - 1}), now_s=0.0)
    assert (adapters.is_tried("tiny", spec), adapters.fault("tiny", spec)) == (False, None)
    adapters.report(report("d1", tried=tried, held=held), now_s=0.0)
    assert (adapters.is_tried("tiny", spec), adapters.fault("tiny", spec)) == (True, None)
    adapters.report(report("d1", tried=tried, held={"blue": "blue@2"}), now_s=0.0)
    assert kind(adapters.fault("tiny", spec)) == FaultKind.UNFIT  # other files
    unfit = AdapterFault(kind=FaultKind.FULL, message="full")
    adapters.report(report("d1", tried=tried, faults={"blue": unfit}), now_s=0.0)
    assert adapters.fault("tiny", spec) == unfit
    adapters.drop("d1")
    assert adapters.fault("tiny", spec) is None


def test_a_failed_try_restores_what_was_wanted_before() -> None:
    adapters = wanted()
    first = loaded(adapters)
    loaded(adapters, is_in_place=True)
    adapters.restore("tiny", "blue", first)
    assert adapters.loaded["tiny"] == {"blue": first}
    adapters.restore("tiny", "blue", None)
    assert adapters.loaded["tiny"] == {}
