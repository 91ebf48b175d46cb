import asyncio

from kaveri.rpc.liveness import Liveness


class HeldCall:
    target = "peer"
    leaves_unheard = True

    def __init__(self, can_fail_over: bool = True) -> None:
        self.can_fail_over = can_fail_over
        self.suspected = asyncio.Event()

    def suspect(self, after_s: float) -> None:
        self.suspected.set()


async def test_a_peer_that_hangs_after_its_first_message_and_before_it_has_answered_a_beat_is_noticed() -> None:
    async def no_answer(target: str) -> None:
        await asyncio.Event().wait()

    liveness, call = Liveness(no_answer), HeldCall()
    liveness.begin(call)
    liveness.heard("peer")
    await asyncio.wait_for(call.suspected.wait(), 30)
    liveness.close()


async def test_a_peer_that_answers_slowly_is_not_suspected_once_it_has_answered_a_beat() -> None:
    """A distant peer, for example. gRPC's keep-alive watches it."""
    answered = asyncio.Event()

    async def one_slow_answer(target: str) -> None:
        if answered.is_set():
            await asyncio.Event().wait()
        await asyncio.sleep(0.4)
        answered.set()

    liveness, call = Liveness(one_slow_answer), HeldCall()
    liveness.begin(call)
    await asyncio.wait_for(answered.wait(), 30)
    other = HeldCall()
    other.target = "another peer"
    liveness.begin(other)
    # It has never sent anything, so it is suspected later than the first one would be.
    await asyncio.wait_for(other.suspected.wait(), 30)
    assert not call.suspected.is_set()
    liveness.close()


async def test_a_call_with_nowhere_else_to_go_waits_on_while_others_of_its_peer_fail_over() -> None:
    async def no_answer(target: str) -> None:
        await asyncio.Event().wait()

    liveness, alone, other = Liveness(no_answer), HeldCall(can_fail_over=False), HeldCall()
    liveness.begin(alone)
    liveness.begin(other)
    await asyncio.wait_for(other.suspected.wait(), 30)
    assert not alone.suspected.is_set()
    # A later call is failed too, while the first one still waits.
    later = HeldCall()
    liveness.begin(later)
    await asyncio.wait_for(later.suspected.wait(), 30)
    assert not alone.suspected.is_set()
    liveness.close()


async def test_a_peer_that_does_not_answer_is_not_asked_again_meanwhile() -> None:
    asked = []

    async def no_answer(target: str) -> None:
        asked.append(target)
        await asyncio.Event().wait()

    liveness, call = Liveness(no_answer), HeldCall()
    liveness.begin(call)
    # It is suspected after more than one interval between beats.
    await asyncio.wait_for(call.suspected.wait(), 30)
    assert asked == ["peer"]
    liveness.close()
