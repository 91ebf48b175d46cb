"""A small part of the kill matrix: `python -m tests.kill_matrix` runs as much of it as one likes."""

import json
import random

import pytest

from tests.kill_matrix.matrix import MatrixOptions, run_matrix
from tests.kill_matrix.plan import HitKind


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("engine", "faults", "kinds"),
    [("fake", 25, tuple(HitKind)), ("kaveri-tiny", 6, (HitKind.KILLED, HitKind.FROZEN))],
    ids=["fake", "kaveri-tiny"],
)
async def test_answers_are_exact_and_nothing_is_left_while_processes_die(
    engine: str, faults: int, kinds: tuple[HitKind, ...]
) -> None:
    # Other tests keep this machine busy.
    options = MatrixOptions(engine=engine, faults=faults, kinds=kinds, seed=random.randrange(2**30), lease_ttl_s=3.0)
    account = await run_matrix(options)
    print(json.dumps(account, indent=1))
    assert not account["violations"], account["violations"][:5]
    assert account["faults"] == faults
    assert account["requests_exact"] > faults
