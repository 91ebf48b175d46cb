"""Starts a router: `python -m services.router --help`."""

import asyncio
import os
import sys
from types import ModuleType
from typing import cast

from kaveri.programs import setting_sections
from kaveri.rpc.process import run_service
from services.router.config import RouterConfig


def main() -> int:
    """Runs the router with the process's own arguments; returns the exit status."""
    return run_service("router", RouterConfig, _serve, setting_sections)


async def _serve(config: RouterConfig, stopping: asyncio.Event) -> int:
    _hide_torch()
    # Imported here, as --help needs the settings alone.
    from services.router.service import serve

    return await serve(config, stopping)


def _hide_torch() -> None:
    """Keeps transformers from importing torch where it is installed: a router only tokenizes, and torch would cost it
    a quarter of a GiB and seconds of its start."""
    # Python takes a None here for a module that is not there.
    cast(dict[str, ModuleType | None], sys.modules)["torch"] = None
    # transformers would say on stderr that it has found no torch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


if __name__ == "__main__":
    sys.exit(main())
