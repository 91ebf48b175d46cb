from dataclasses import replace

from kaveri.cluster.broadcasts import broadcast_statuses, has_new_loads, is_news, told_by
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, InstanceStatus, Phase, Role

_ROUTER = InstanceRecord("router-0", 1, Role.ROUTER, "h:1", "tiny")
_DECODE = InstanceRecord("decode-0", 1, Role.ENGINE, "h:2", "tiny", phases=(Phase.DECODE,))


def _view(*instances: InstanceStatus) -> ClusterView:
    return ClusterView({instance.record.instance_id: instance for instance in instances})


def _decode(free_blocks: int, state: InstanceState = InstanceState.READY, incarnation: int = 1) -> InstanceStatus:
    load = InstanceLoad(state=state, free_blocks=free_blocks, total_blocks=100)
    return InstanceStatus(replace(_DECODE, incarnation=incarnation), load)


def _is_news_after(told: InstanceStatus, *now: InstanceStatus) -> bool:
    view = _view(told, InstanceStatus(_ROUTER, InstanceLoad()))
    return is_news(told_by(view, broadcast_statuses(view)), _view(*now))


def test_an_arrival_a_drain_a_new_life_and_an_end_are_news_and_other_roles_are_not() -> None:
    told = _decode(50)
    other = InstanceStatus(replace(_DECODE, instance_id="decode-1"), InstanceLoad())
    assert not _is_news_after(told, told)
    assert not _is_news_after(told, told, InstanceStatus(_ROUTER, InstanceLoad(state=InstanceState.DRAINING)))
    assert _is_news_after(told, told, other)
    assert _is_news_after(told, _decode(50, InstanceState.DRAINING))
    assert _is_news_after(told, _decode(50, incarnation=2))
    assert _is_news_after(told)


def test_free_blocks_are_news_where_less_than_a_quarter_was_free() -> None:
    assert _is_news_after(_decode(24), _decode(25))
    assert not _is_news_after(_decode(24), _decode(24))
    assert not _is_news_after(_decode(24), _decode(10))
    assert not _is_news_after(_decode(25), _decode(100))


def test_a_broadcast_holds_the_loads_of_its_moment() -> None:
    told = _decode(24)
    statuses = broadcast_statuses(_view(told, InstanceStatus(_ROUTER, InstanceLoad())))
    assert statuses == (told,)


def test_a_load_is_new_when_its_instance_has_numbered_it_again_and_is_one_of_those_that_are_broadcast() -> None:
    told = _view(_decode(50), InstanceStatus(_ROUTER, InstanceLoad()))
    summary = told_by(told, broadcast_statuses(told))
    again = _decode(50)
    numbered = replace(again, load=replace(again.load, sequence_number=1))
    assert not has_new_loads(summary, _view(again, InstanceStatus(_ROUTER, InstanceLoad(1))))
    assert has_new_loads(summary, _view(numbered, InstanceStatus(_ROUTER, InstanceLoad())))
