"""Pairs of instances that hold each other's KV copies."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, InstanceStatus, Phase, Role
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.pairs import PartnerOrder, pair_up, partner_orders

LAYOUT = KvLayout("model", layer_count=2, block_tokens=16, kv_head_count=2, head_dim=8, dtype="float32")
OTHER_LAYOUT = replace(LAYOUT, block_tokens=32)


def instance(
    name: str,
    partner_id: str | None = "",
    host: str = "a",
    model: str = "model",
    layout: KvLayout = LAYOUT,
    phase: Phase = Phase.DECODE,
    **load: object,
) -> InstanceStatus:
    record = InstanceRecord(name, 1, Role.ENGINE, f"{host}:1", model, layout=layout, phases=(phase,))
    figures = {"replica_total_bytes": 100} | load
    age_s = float(figures.pop("age_s", 0.0))  # type: ignore[arg-type]
    return InstanceStatus(record, InstanceLoad(partner_id=partner_id, **figures), age_s)  # type: ignore[arg-type]


def orders(*instances: InstanceStatus, under_way: dict[str, PartnerOrder] | None = None) -> dict[str, str]:
    view = ClusterView({one.record.instance_id: one for one in instances})
    return {order.instance_id: order.partner_id for order in partner_orders(view, under_way or {})}


def test_an_instance_that_prefills_is_paired_with_one_that_decodes() -> None:
    prefills = [instance(name, phase=Phase.PREFILL) for name in ("e0", "e1")]
    assert orders(*prefills, instance("e2"), instance("e3")) == {"e0": "e2", "e2": "e0", "e1": "e3", "e3": "e1"}
    assert orders(*prefills) == {"e0": "e1", "e1": "e0"}


def test_instances_of_one_host_are_paired_first_and_those_left_over_across_hosts() -> None:
    assert orders(instance("e0"), instance("e1", host="b"), instance("e2"), instance("e3", host="c")) == {
        "e0": "e2",
        "e2": "e0",
        "e1": "e3",
        "e3": "e1",
    }


def test_only_instances_of_one_model_and_layout_are_paired() -> None:
    assert orders(instance("e0"), instance("e1", model="other"), instance("e2", layout=OTHER_LAYOUT)) == {}


def test_an_instance_that_is_not_to_be_in_a_pair_gets_no_order() -> None:
    assert orders(instance("e0", None), instance("e1", None), instance("e2")) == {}


def test_the_partner_of_an_instance_that_left_is_paired_with_the_one_left_over_and_others_stay() -> None:
    others = instance("e2", "e3"), instance("e3", "e2")
    assert orders(instance("e1", "e0"), *others) == {"e1": ""}
    assert orders(instance("e1", "e0"), *others, instance("e4")) == {"e1": "e4", "e4": "e1"}


def test_a_new_life_of_an_instance_gets_its_former_partner() -> None:
    assert orders(instance("e0"), instance("e1", "e0")) == {"e0": "e1"}


def test_an_instance_that_drains_or_holds_no_copies_loses_its_partner_which_gets_another() -> None:
    for load in ({"state": InstanceState.DRAINING}, {"replica_total_bytes": 0}):
        assert orders(instance("e0", "e1", **load), instance("e1", "e0"), instance("e2")) == {
            "e0": "",
            "e1": "e2",
            "e2": "e1",
        }


def test_a_pair_outlasts_late_heartbeats_and_a_late_instance_gets_no_new_partner() -> None:
    late = {"age_s": 1000.0}
    assert orders(instance("e0", "e1", **late), instance("e1", "e0"), instance("e2")) == {}
    assert orders(instance("e0", **late), instance("e1"), instance("e2")) == {"e1": "e2", "e2": "e1"}
    assert orders(instance("e0", **late), instance("e1", **late), instance("e2")) == {}


def test_without_the_store_nothing_is_decided() -> None:
    view = ClusterView({one.record.instance_id: one for one in (instance("e0"), instance("e1"))}, store_connected=False)
    assert partner_orders(view, {}) == ()


def test_an_order_that_no_load_shows_yet_is_not_repeated_unless_the_instance_has_restarted() -> None:
    given = {"e0": PartnerOrder("e0", 1, "e1"), "e1": PartnerOrder("e1", 1, "e0")}
    assert orders(instance("e0"), instance("e1"), under_way=given) == {}
    given["e0"] = PartnerOrder("e0", 7, "e1")
    assert orders(instance("e0"), instance("e1"), under_way=given) == {"e0": "e1"}


NAMES = [f"e{number}" for number in range(7)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", *NAMES]), st.sampled_from("ab"), st.sampled_from([LAYOUT, OTHER_LAYOUT]), st.booleans()
        ),
        max_size=7,
    )
)
def test_partners_are_mutual_alike_and_kept_and_at_most_one_of_a_kind_is_left_over(
    drawn: list[tuple[str, str, KvLayout, bool]],
) -> None:
    cluster = [
        instance(name, partner, host, layout=layout, phase=Phase.PREFILL if prefills else Phase.DECODE)
        for name, (partner, host, layout, prefills) in zip(NAMES, drawn, strict=False)
    ]
    by_id = {one.record.instance_id: one for one in cluster}
    before = {name: one.load.partner_id or "" for name, one in by_id.items()}
    found = pair_up(cluster, before)
    assert set(found) == set(by_id)
    for name, partner in found.items():
        if partner:
            assert found[partner] == name != partner
            assert by_id[partner].record.layout == by_id[name].record.layout
        was = before[name]
        if before.get(was) == name != was and by_id[was].record.layout == by_id[name].record.layout:
            assert partner == was
    for layout in (LAYOUT, OTHER_LAYOUT):
        assert sum(found[name] == "" for name, one in by_id.items() if one.record.layout == layout) <= 1
    assert pair_up(cluster, found) == found
