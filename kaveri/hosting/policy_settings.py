"""Policies that settings can name: Kaveri's own, and plug-ins, whose faults are logged and counted."""

import enum
import time
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client import Counter

from kaveri.plugins.registry import PluginPoint
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.policy.plugins import (
    BatchAdmission,
    DecodePlacement,
    Guarded,
    HolderPlacement,
    PrefillPlacement,
    PromptOrder,
)
from kaveri.policy.replication import ReplicationMode
from kaveri.telemetry.logs import get_logger

GROUP = "kaveri.policies"
"""Entry-point group. An entry is named by the setting's flag, a dot and the policy's name:
"decode-placement.nearest"."""
_SECONDS_BETWEEN_LINES = 10.0

FAULTS = Counter(
    "kaveri_policy_faults",
    "Decisions that the default policy made because a plug-in raised, or answered against its contract.",
    ["policy"],
)


class PolicyFaults:
    """Counts the faults of one plug-in policy, and logs the first one, then at most one in ten seconds."""

    def __init__(self, policy: str, plugin: str) -> None:
        """policy: the setting's name. plugin: the setting's value, which names the plug-in."""
        self._policy = policy
        self._plugin = plugin
        self._unlogged = 0
        self._logged_s: float | None = None

    def __call__(self, reason: str) -> None:
        """Record a fault of the plug-in, after which the default policy decided."""
        FAULTS.labels(self._policy).inc()
        self._unlogged += 1
        now_s = time.monotonic()
        if self._logged_s is not None and now_s - self._logged_s < _SECONDS_BETWEEN_LINES:
            return
        get_logger().error(
            "policy_failed",
            policy=self._policy,
            plugin=self._plugin,
            reason=reason,
            faults=self._unlogged,
            effect="the default policy decides",
        )
        self._logged_s, self._unlogged = now_s, 0


@dataclass(frozen=True, kw_only=True)
class PolicyPoint(PluginPoint):
    """A setting that selects a policy: one of Kaveri's own, or a plug-in."""

    name: str
    contract: type[Any]
    """Base class of plug-ins."""

    @classmethod
    def of(cls, name: str, choices: type[enum.StrEnum], contract: type[Any]) -> Self:
        """Create the PolicyPoint of setting `name`. choices: Kaveri's policies. contract: base class of plug-ins."""
        flag = name.replace("_", "-")
        own = {choice.value: f"{choices.__module__}:{choices.__name__}.{choice.name}" for choice in choices}
        return cls(kind=f"--{flag}", group=GROUP, own=own, prefix=f"{flag}.", name=name, contract=contract)

    def parse(self, text: str) -> Any:
        """Parse the setting's value: one of its choices, or a plug-in whose faults are caught. Raises ValueError."""
        found = self.load(text)
        return found if text in self.own else Guarded(found, PolicyFaults(self.name, text))

    def load(self, name: str) -> Any:
        """Load a policy by name; a plug-in's class is instantiated. Raises ValueError."""
        found = super().load(name)
        if name in self.own:
            return found
        if isinstance(found, type) and issubclass(found, self.contract):
            try:
                found = found()
            except Exception as error:
                raise ValueError(f"{name!r:.200} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(found, self.contract):
            raise ValueError(f"{name!r:.200} is no {self.contract.__module__}.{self.contract.__name__}")
        return found


PREFILL_PLACEMENTS = PolicyPoint.of("placement_policy", PlacementPolicy, PrefillPlacement)
ORDERINGS = PolicyPoint.of("prefill_policy", OrderingPolicy, PromptOrder)
DECODE_PLACEMENTS = PolicyPoint.of("decode_placement", DecodePlacementPolicy, DecodePlacement)
ADMISSIONS = PolicyPoint.of("decode_policy", AdmissionPolicy, BatchAdmission)
REPLICATIONS = PolicyPoint.of("replication", ReplicationMode, HolderPlacement)
POLICY_POINTS = (PREFILL_PLACEMENTS, ORDERINGS, DECODE_PLACEMENTS, ADMISSIONS, REPLICATIONS)
