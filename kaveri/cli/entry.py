"""Entry point of the console script `kaveri`: says what to install if only the SDK is installed."""

import sys
from typing import NoReturn

from kaveri.extras import lacks


def main() -> NoReturn:
    try:
        from kaveri.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kaveri":
            raise
        sys.exit(f"kaveri: {lacks(error.name, 'serve')}")
    run()
