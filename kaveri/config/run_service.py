"""`python -P -m kaveri.config.run_service services.router FLAGS` runs a service, wherever its code lies."""

import runpy
import sys

from kaveri.config.services import find_services


def main() -> None:
    """Run the service module named by the first command-line argument, with the remaining arguments."""
    find_services()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
