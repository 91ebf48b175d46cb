"""Where a hold is travels between the two legs of a request, whatever kind of address it has."""

import json

import pytest

from services.instance.hold_params import HoldAt, read_hold, write_hold
from services.prefill.holds import HOLD_ID_BYTES, HoldName


@pytest.mark.parametrize(
    ("address", "host"), [("[fd00::1]:7", "fd00::1"), ("10.0.0.1:7", "10.0.0.1"), ("gpu-1:7", "gpu-1")]
)
def test_a_hold_is_read_as_it_was_written_with_brackets_and_without(address: str, host: str) -> None:
    hold = HoldAt("prefill-0", address, HoldName(3, b"x" * HOLD_ID_BYTES))
    written = json.loads(write_hold(hold))
    assert (written["remote_host"], written["remote_port"]) == (host, 7)
    assert read_hold(json.dumps(written)) == hold
    assert read_hold(json.dumps(written | {"remote_host": address.rpartition(":")[0]})) == hold
