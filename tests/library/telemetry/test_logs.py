import contextlib
import json
import subprocess
import sys

import pytest
import structlog

from kaveri.telemetry.logs import configure_logs, get_logger

_LOG = """
from dataclasses import astuple
from kaveri.telemetry.logs import configure_logs, get_logger, log_settings
assert log_settings() is None
configure_logs("decode", "decode-0", "warning")
get_logger().info("not shown")
get_logger().bind(request_id="r").warning("of the instance")
service, instance_id, level, _ = astuple(log_settings())
configure_logs(service, instance_id, level, rank=1)
get_logger().warning("of the rank")
"""


def test_a_rank_logs_as_its_instance_with_its_number() -> None:
    ran = subprocess.run([sys.executable, "-c", _LOG], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    instance, rank = (json.loads(line) for line in ran.stderr.splitlines())
    assert {**instance, "timestamp": ""} == {
        "service": "decode",
        "instance_id": "decode-0",
        "request_id": "r",
        "event": "of the instance",
        "level": "warning",
        "timestamp": "",
    }
    assert (rank["service"], rank["instance_id"], rank["rank"]) == ("decode", "decode-0", 1)


_LOG_TO_A_FULL_DISK = """
import os, sys
from kaveri.telemetry.logs import configure_logs, get_logger
written = os.dup(1)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
configure_logs("decode", "decode-0")
log = get_logger().bind(request_id="r")
for _ in range(1000):
    try:
        raise ValueError("what is logged")
    except ValueError:
        log.exception("not written")
sys.stderr.close()
log.warning("not written either")
os.write(written, b"still running")
os._exit(0)
"""


def test_lines_that_cannot_be_written_are_lost_and_raise_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", _LOG_TO_A_FULL_DISK], stdout=subprocess.PIPE, timeout=60, check=True)
    assert ran.stdout == b"still running"


class _Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text of this")


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_value_that_cannot_be_printed_raises_nothing(is_configured: bool) -> None:
    with contextlib.ExitStack() as stack:
        if is_configured:
            before = structlog.get_config()
            stack.callback(lambda: structlog.configure(**before))
            configure_logs("decode", "decode-0")
        get_logger().warning("unprintable", value=_Unprintable())
        get_logger().bind(value=_Unprintable()).info("unprintable")


def test_bound_values_and_those_of_the_line_are_on_it() -> None:
    with structlog.testing.capture_logs() as lines:
        get_logger().bind(request_id="r").bind(attempt=1).error("failed", reason="why")
    assert lines == [{"request_id": "r", "attempt": 1, "reason": "why", "event": "failed", "log_level": "error"}]
