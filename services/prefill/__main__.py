"""`python -P -m services.prefill`: runs one prefill instance."""

import sys

from kaveri.rpc.process import run_service
from services.prefill.config import PrefillConfig
from services.prefill.service import serve


def main() -> int:
    """Returns the exit status."""
    return run_service("prefill", PrefillConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
