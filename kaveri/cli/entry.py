"""Entry point of the console script `kaveri`. The SDK's package alone lacks the command's packages."""

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
