"""The table of HTTP parameters in the documents is the code's."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_parameters_is_what_the_gateway_takes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "parameter_table.py"), "--check"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0, "run scripts/parameter_table.py"
