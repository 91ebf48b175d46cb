from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.view import InstanceStatus
from kaveri.policy.unconfirmed import UnconfirmedWork
from tests.library.policy.reference_choices import PlainUnconfirmedWork
from tests.library.policy.views import DECODE, instance

_IDS = ("i0", "i1")
_KEYS = ("a", "b", "c", "d")
_STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(_IDS), st.sampled_from(_KEYS), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(_IDS), st.sampled_from(_KEYS)),
    st.tuples(st.just("heartbeat"), st.sampled_from(_IDS), st.integers(0, 3)),
    st.tuples(st.just("restart"), st.sampled_from(_IDS)),
    st.tuples(st.just("look"), st.sampled_from(_IDS)),
)


def _status(instance_id: str, life: int, heartbeat: int) -> InstanceStatus:
    return instance(instance_id, DECODE, incarnation=life, sequence_number=heartbeat)


@given(st.lists(_STEPS, max_size=40))
def test_running_sums_equal_the_sums_over_all_pieces(steps: list[tuple[object, ...]]) -> None:
    work: UnconfirmedWork[str] = UnconfirmedWork()
    plain = PlainUnconfirmedWork()
    shown = {instance_id: _status(instance_id, 1, 1) for instance_id in _IDS}

    def look(instance_id: str) -> int:
        sums = work.at(shown[instance_id])
        assert (sums.count, sums.amount, sums.heavy_count) == plain.sums(shown[instance_id])
        return sums.count

    for step in steps:
        match step:
            case ("add", str(instance_id), str(key), int(amount), bool(heavy)):
                work.add(key, shown[instance_id], amount, heavy)
                plain.add(key, shown[instance_id], amount, heavy)
            case ("remove", str(instance_id), str(key)):
                work.remove(key, instance_id)
                plain.remove(key, instance_id)
            case ("heartbeat", str(instance_id), int(count)):
                life = shown[instance_id]
                heartbeat = life.load.sequence_number + count
                shown[instance_id] = _status(instance_id, life.record.incarnation, heartbeat)
            case ("restart", str(instance_id)):
                shown[instance_id] = _status(instance_id, shown[instance_id].record.incarnation + 1, 1)
            case ("look", str(instance_id)):
                look(instance_id)
    assert sum(map(look, _IDS)) == len(work)
    for instance_id in _IDS:
        for key in _KEYS:
            work.remove(key, instance_id)
    assert len(work) == 0
