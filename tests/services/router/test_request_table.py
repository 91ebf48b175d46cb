"""Which later session takes the place of an earlier one."""

import asyncio

import pytest

from kaveri.errors import InvalidArgument
from services.router.request_table import RequestTable

SECRET = b"s" * 16


@pytest.mark.parametrize(
    ("session", "secret", "field"),
    [(3, b"t" * 16, "secret"), (3, b"", "secret"), (2, SECRET, "session"), (1, SECRET, "session")],
)
async def test_a_session_that_is_not_the_next_one_of_the_same_request_leaves_the_present_one_alone(
    session: int, secret: bytes, field: str
) -> None:
    table = RequestTable(1)
    present, late = (asyncio.create_task(asyncio.sleep(60.0)) for _ in range(2))
    slot = table.reserve("r", 2, SECRET, present)
    with pytest.raises(InvalidArgument) as refused:
        table.reserve("r", session, secret, late)
    assert refused.value.field == field
    assert table.slot_of("r") is slot
    assert not slot.interrupted
    for task in (present, late):
        task.cancel()
