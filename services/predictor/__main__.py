"""`python -P -m services.predictor`: runs one predictor instance."""

import asyncio
import sys

from kaveri.programs import setting_sections
from kaveri.rpc.process import run_service
from services.predictor.config import PredictorConfig


def main() -> int:
    return run_service("predictor", PredictorConfig, _serve, setting_sections)


async def _serve(config: PredictorConfig, stopping: asyncio.Event) -> int:
    # Import here: --help needs only the settings.
    from services.predictor.service import serve

    return await serve(config, stopping)


if __name__ == "__main__":
    sys.exit(main())
