"""`python -P -m services.instance`: runs one colocated instance."""

import sys

from kaveri.rpc.process import run_service
from services.instance.config import ColocatedConfig
from services.instance.service import serve


def main() -> int:
    """Returns the exit status."""
    return run_service("colocated", ColocatedConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
