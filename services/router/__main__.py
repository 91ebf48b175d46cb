"""Starts a router: `python -m services.router --help`."""

import asyncio
import sys

from kaveri.extras import hide_torch
from kaveri.programs import setting_sections
from kaveri.rpc.process import run_service
from services.router.config import RouterConfig


def main() -> int:
    """Run the router with the process's arguments. Returns the exit status."""
    return run_service("router", RouterConfig, _serve, setting_sections)


async def _serve(config: RouterConfig, stopping: asyncio.Event) -> int:
    hide_torch()
    # Imported here, as --help needs the settings alone.
    from services.router.service import serve

    return await serve(config, stopping)


if __name__ == "__main__":
    sys.exit(main())
