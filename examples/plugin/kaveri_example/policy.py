"""A policy: `--decode-placement most-room`."""

import random
from collections.abc import Sequence

from kaveri.policy.demand import Demand
from kaveri.policy.plugins import DecodePlacement, Option


class MostRoom(DecodePlacement):
    """Chooses the decode instance with the most free blocks, less those that were asked for since its heartbeat."""

    def choose(self, options: Sequence[Option], demand: Demand, rng: random.Random) -> str:
        """See DecodePlacement.choose."""
        most = max(_free_blocks(option) for option in options)
        return rng.choice([option.instance_id for option in options if _free_blocks(option) == most])


def _free_blocks(option: Option) -> int:
    return option.instance.load.free_blocks - option.sent_amount
