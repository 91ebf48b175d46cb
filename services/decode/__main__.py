"""`python -P -m services.decode`: runs one decode instance."""

import sys

from kaveri.rpc.process import run_service
from services.decode.config import DecodeConfig
from services.decode.service import serve


def main() -> int:
    """Returns the exit status."""
    return run_service("decode", DecodeConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
