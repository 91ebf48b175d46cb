import os
import subprocess
import sys

PROGRAM = (sys.executable, "-c", "from kaveri.cli.main import main; main()")


def run_kaveri(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `kaveri ARGUMENTS` in a new process, with these variables added to the environment."""
    command, variables = [*PROGRAM, *arguments], os.environ | environment
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=variables)
