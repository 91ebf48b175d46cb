"""Starts a gateway: `python -P -m services.gateway --help`."""

import asyncio
import sys

from kaveri.errors import ConfigError
from kaveri.extras import lacks
from kaveri.programs import setting_sections
from kaveri.rpc.process import run_service
from services.gateway.config import GatewayConfig


def main() -> int:
    return run_service("gateway", GatewayConfig, _serve, setting_sections)


async def _serve(config: GatewayConfig, stopping: asyncio.Event) -> int:
    try:
        # Import here: --help works without the packages of the extra.
        from services.gateway import service
    except ModuleNotFoundError as error:
        raise ConfigError("gateway", lacks(str(error.name), "gateway")) from error
    return await service.serve(config, stopping)


if __name__ == "__main__":
    sys.exit(main())
