"""`python -P -m services.instance COMMAND`: runs one engine instance. COMMAND: which phases it serves first."""

import asyncio
import sys
from typing import Any

from kaveri.extras import hide_torch
from kaveri.programs import setting_sections
from kaveri.rpc.process import run_service
from services.instance.config import ColocatedConfig, DecodeConfig, PhasesConfig, PrefillConfig

COMMANDS: dict[str, type[PhasesConfig]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "colocated": ColocatedConfig,
}


def main() -> int:
    """Run the instance that the command line describes. Returns the exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        sys.exit(f"services.instance: the first argument is {command!r}; it must be {', '.join(COMMANDS)}")
    return run_service(command, COMMANDS[command], _serve, setting_sections, sys.argv[2:])


async def _serve(config: Any, stopping: asyncio.Event) -> int:
    if config.engine == "fake":
        hide_torch()
    # Imported here, as --help needs the settings alone.
    from services.instance.service import serve

    return await serve(config, stopping)


if __name__ == "__main__":
    sys.exit(main())
