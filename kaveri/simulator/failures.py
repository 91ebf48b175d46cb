"""Deaths and restarts of simulated instances, at given or random times. Pure."""

import math
import re
from dataclasses import dataclass

from kaveri.errors import ConfigError

_FORM = re.compile(r"([a-z]+-\d+)@(\d+(?:\.\d+)?)s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Death of an instance's process at `at_s` seconds: its state is lost, and connections to it break at once."""

    instance_id: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec:
    """Scheduled and random deaths of simulated instances, and the time until they restart."""

    deaths: tuple[Death, ...] = ()
    mtbf_s: float | None = None
    """Mean seconds between random deaths of one instance, exponentially distributed. None: no random deaths."""
    repair_s: float | None = 5.0
    """Seconds from a death to the restart, with an empty KV pool. None: no restart."""

    def __post_init__(self) -> None:
        for name, value in (("mtbf", self.mtbf_s), ("repair", self.repair_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(name, f"is {value!r}; it must be a number of seconds above 0")
        for death in self.deaths:
            if not 0 <= death.at_s < math.inf:
                raise ConfigError("fail", f"is at {death.at_s!r} s; it must be a time of at least 0")

    def require_known(self, instance_ids: tuple[str, ...]) -> None:
        """Raise ConfigError if a scheduled death names an instance other than these."""
        for death in self.deaths:
            if death.instance_id not in instance_ids:
                raise ConfigError("fail", f"names {death.instance_id!r}; there are {', '.join(instance_ids)}")


def parse_death(text: str) -> Death:
    """Parse an instance and its time of death, such as "decode-1@30s". Raises ConfigError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError("fail", f"is {text!r}; write an instance and a time, such as decode-1@30s")
    return Death(instance_id=found[1], at_s=float(found[2]))
