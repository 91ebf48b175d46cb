"""`python -P -m services.instance COMMAND`: runs one engine instance, which serves first what the command says."""

import sys

from kaveri.rpc.process import run_service
from services.instance.config import ColocatedConfig, DecodeConfig, PhasesConfig, PrefillConfig
from services.instance.service import serve

COMMANDS: dict[str, type[PhasesConfig]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "colocated": ColocatedConfig,
}


def main() -> int:
    """Returns the exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        sys.exit(f"services.instance: the first argument is {command!r}; it must be {', '.join(COMMANDS)}")
    return run_service(command, COMMANDS[command], serve, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
