"""`python -P -m services.predictor`: runs one predictor instance."""

import sys

from kaveri.rpc.process import run_service
from services.predictor.config import PredictorConfig
from services.predictor.service import serve


def main() -> int:
    """Returns the exit status."""
    return run_service("predictor", PredictorConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
