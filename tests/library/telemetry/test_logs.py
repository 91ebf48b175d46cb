"""Log lines say whose they are, those of a rank's process as those of its instance."""

import json
import subprocess
import sys

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
    # Logging is set up once in a process.
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
