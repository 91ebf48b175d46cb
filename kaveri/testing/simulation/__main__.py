"""`python -m kaveri.testing.simulation`: runs schedules by their seeds, or replays one with its trace."""

import sys

from kaveri.testing.simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
