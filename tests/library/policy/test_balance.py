"""Which requests a decode instance moves to level its batch with another one's."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, InstanceStatus, Phase, Role
from kaveri.policy.balance import Batch, Moves, RunningRequest, most_to_partner, plan_moves, plan_within_pair
from tests.library.policy.views import LAYOUT

POOL_BLOCKS = 1000
POOL_TOKENS = POOL_BLOCKS * LAYOUT.block_tokens


def record(number: int) -> InstanceRecord:
    address = f"host:{number}"
    return InstanceRecord(f"engine-{number}", 1, Role.ENGINE, address, "model", layout=LAYOUT, phases=(Phase.DECODE,))


def view_of(*context_tokens: int, **changes: InstanceStatus) -> ClusterView:
    """Decode instances with batches of so many tokens. changes: other statuses, by "engine_<number>"."""
    found = {
        f"engine-{number}": InstanceStatus(
            record(number),
            InstanceLoad(
                1, context_tokens=tokens, total_blocks=POOL_BLOCKS, replica_total_bytes=1, replica_free_bytes=1
            ),
            0.1,
        )
        for number, tokens in enumerate(context_tokens)
    }
    return ClusterView(found | {name.replace("_", "-"): status for name, status in changes.items()})


def plan(
    view: ClusterView,
    number: int,
    requests: Sequence[int | RunningRequest[int]],
    sent_tokens: int = 0,
    taken: Collection[int] | None = None,
    former: int | None = None,
) -> Moves[int] | None:
    """Plan of instance `number`. requests: their context tokens, or with the place of a copy. sent_tokens: moved to
    each other instance, and not in its heartbeat yet. taken: keys that others have room for; None: all. former: number
    of the last plan's target."""
    running = [
        each if isinstance(each, RunningRequest) else RunningRequest(place, each) for place, each in enumerate(requests)
    ]
    own = record(number)
    return plan_moves(
        view,
        own,
        running,
        lambda one: 0 if one.record == own else sent_tokens,
        lambda _, request: taken is None or request.key in taken,
        record(former) if former is not None else None,
    )


def moved(found: Moves[int] | None) -> tuple[str, tuple[int, ...]] | None:
    return None if found is None else (found.target.instance_id, found.keys)


def test_the_longest_batch_is_levelled_with_the_shortest_and_the_second_with_the_second() -> None:
    tokens = POOL_TOKENS // 10
    view = view_of(5 * tokens, 2 * tokens, 9 * tokens, 0, 3 * tokens)
    requests = [tokens // 2] * 20
    found = [moved(plan(view, number, requests)) for number in range(5)]
    assert [one and one[0] for one in found] == ["engine-1", None, "engine-3", None, None]


def test_the_newest_requests_move_until_both_batches_are_as_long() -> None:
    tokens = POOL_TOKENS // 10
    assert moved(plan(view_of(4 * tokens, 0), 0, [tokens] * 4)) == ("engine-1", (3, 2))
    assert moved(plan(view_of(4 * tokens, tokens), 0, [tokens] * 4)) == ("engine-1", (3,))
    assert plan(view_of(4 * tokens, 0), 0, [3 * tokens, 3 * tokens]) is None, "the other one's would be the longer"


def test_requests_whose_copy_is_at_the_other_instance_move_first() -> None:
    tokens = POOL_TOKENS // 10
    requests = [RunningRequest(number, tokens, "engine-1" if number < 2 else "engine-2") for number in range(6)]
    assert moved(plan(view_of(6 * tokens, 0), 0, requests)) == ("engine-1", (1, 0, 5))
    requests[2] = RunningRequest(2, tokens)
    assert moved(plan(view_of(6 * tokens, 0), 0, requests)) == ("engine-1", (1, 0, 2))


def test_requests_that_the_other_instance_has_no_room_for_stay() -> None:
    tokens = POOL_TOKENS // 10
    assert moved(plan(view_of(6 * tokens, 0), 0, [tokens] * 6, taken=[0, 2])) == ("engine-1", (2, 0))
    assert plan(view_of(6 * tokens, 0), 0, [tokens] * 6, taken=[]) is None


def test_the_target_of_the_last_plan_stays_while_its_batch_is_short() -> None:
    """Or copies that were made there would be for nothing when two long batches change places."""
    tokens = POOL_TOKENS // 10
    for longer in (6 * tokens, 6 * tokens + 1):
        view = view_of(longer, 6 * tokens, tokens, 0)
        for number in (0, 1):
            for former in (2, 3):
                found = moved(plan(view, number, [tokens] * 6, former=former))
                assert found is not None
                assert found[0] == f"engine-{former}"
    for view in (view_of(6 * tokens, 4 * tokens, 0), view_of(6 * tokens, 0)):
        found = moved(plan(view, 0, [tokens] * 6, former=1 if len(view.instances) == 3 else 7))
        assert found is not None
        assert found[0] != "engine-7"
        assert found[0] == ("engine-2" if len(view.instances) == 3 else "engine-1")


def test_small_differences_stay() -> None:
    tokens = POOL_TOKENS // 10
    requests = [tokens // 10] * 60
    assert plan(view_of(6 * tokens, 3 * tokens), 0, requests) is not None
    assert plan(view_of(6 * tokens, 3 * tokens + 1), 0, requests) is None
    least = POOL_TOKENS // 16
    assert plan(view_of(least, 0), 0, [least // 4] * 4) is not None
    assert plan(view_of(least - 1, 0), 0, [least // 4] * 4) is None, "steps would hardly become shorter"
    assert plan(view_of(least + 200, 200), 0, [least // 4] * 4) is not None
    assert plan(view_of(least + 200, 201), 0, [least // 4] * 4) is None


def test_requests_that_no_heartbeat_shows_yet_count() -> None:
    tokens = POOL_TOKENS // 10
    assert plan(view_of(4 * tokens, 0), 0, [tokens] * 4, sent_tokens=2 * tokens) is not None
    assert plan(view_of(4 * tokens, 0), 0, [tokens] * 4, sent_tokens=2 * tokens + 1) is None


def test_nothing_moves_to_an_instance_that_cannot_take_it() -> None:
    tokens = POOL_TOKENS // 10
    view = view_of(4 * tokens, 0)
    idle = view.instances["engine-1"]
    assert isinstance(idle, InstanceStatus)
    others = {
        "no copies": replace(idle, load=replace(idle.load, replica_total_bytes=0)),
        "draining": replace(idle, load=replace(idle.load, state=InstanceState.DRAINING)),
        "late": replace(idle, heartbeat_age_s=record(1).lease_ttl_s),
        "prefills": replace(idle, record=replace(idle.record, phases=(Phase.PREFILL,))),
        "another model": replace(idle, record=replace(idle.record, model="other")),
        "another layout": replace(idle, record=replace(idle.record, layout=replace(LAYOUT, block_tokens=99))),
    }
    for name, status in others.items():
        assert plan(view_of(4 * tokens, 0, engine_1=status), 0, [tokens] * 4) is None, name
    assert plan(view, 2, [tokens] * 4) is None, "an instance that is not in the view"


@given(
    st.lists(st.integers(0, POOL_TOKENS), min_size=2, max_size=6),
    st.lists(st.integers(1, POOL_TOKENS // 4), max_size=12),
    st.integers(0, 5),
)
def test_moves_never_make_the_other_batch_the_longer_one(others: list[int], requests: list[int], number: int) -> None:
    number %= len(others)
    others[number] = sum(requests)
    found = plan(view_of(*others), number, requests)
    if found is not None:
        taken = sum(requests[key] for key in found.keys)
        other = others[int(found.target.instance_id.removeprefix("engine-"))]
        assert taken > 0
        assert other + taken <= sum(requests) - taken


REQUESTS = st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=10)


@given(REQUESTS, REQUESTS)
def test_a_few_moves_within_a_pair_level_the_number_of_requests_and_end_whichever_can_move(
    one: list[tuple[int, bool]], other: list[tuple[int, bool]]
) -> None:
    can_all_move = all(is_movable for _, is_movable in (*one, *other))
    batches = one, other
    for _ in range(11):
        for own, partner in (batches, batches[::-1]):
            lengths = [[length for length, _ in batch] for batch in (own, partner)]
            movable = [RunningRequest(place, own[place][0], "partner") for place in range(len(own)) if own[place][1]]
            key = plan_within_pair(*(Batch(len(each), sum(each)) for each in lengths), movable)
            if key is not None:
                partner.append(own.pop(key))
                break
        else:
            break
    else:
        raise AssertionError("requests move to and fro")
    assert not can_all_move or abs(len(one) - len(other)) <= 1


@given(REQUESTS, REQUESTS)
@example([(12_000, True)], [(500, True)] * 10)
def test_levelling_by_tokens_and_within_the_pair_do_not_undo_each_other(
    one: list[tuple[int, bool]], other: list[tuple[int, bool]]
) -> None:
    batches = one, other
    for _ in range(30):
        for number, (own, partner) in enumerate((batches, batches[::-1])):
            found = [Batch(len(batch), sum(length for length, _ in batch)) for batch in (own, partner)]
            view = view_of(*(batch.context_tokens for batch in (found if number == 0 else found[::-1])))
            target = record(1 - number)
            movable = [
                RunningRequest(place, length, target.instance_id) for place, (length, moves) in enumerate(own) if moves
            ]
            limit = {target.instance_id: most_to_partner(*found)}
            moves = plan_moves(view, record(number), movable, lambda _: 0, lambda *_: True, None, limit)
            key = plan_within_pair(*found, movable)
            keys = moves.keys if moves is not None else () if key is None else (key,)
            for place in sorted(keys, reverse=True):
                partner.append(own.pop(place))
            if keys:
                break
        else:
            break
    else:
        raise AssertionError("requests move to and fro")


def test_within_a_pair_only_requests_whose_copy_is_at_the_partner_move() -> None:
    movable = [RunningRequest("b", 200, "partner")]
    assert plan_within_pair(Batch(5, 1000), Batch(3, 900), movable) == "b"
    assert plan_within_pair(Batch(5, 1000), Batch(3, 900), []) is None
    assert plan_within_pair(Batch(4, 1000), Batch(3, 900), movable) is None
