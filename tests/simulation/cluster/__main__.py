"""`python -m tests.simulation.cluster`: runs schedules by their seeds, or replays one with its trace."""

import sys

from tests.simulation.cluster.command import main

if __name__ == "__main__":
    sys.exit(main())
