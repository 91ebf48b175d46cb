"""One change of a request's owner: an instance was lost, and another one goes on."""

from dataclasses import dataclass

from kaveri.telemetry.logs import get_logger
from services.router import metrics


@dataclass(slots=True)
class OwnerChange:
    """From the loss of an instance to the next token. A second loss meanwhile belongs to the same change."""

    cause: str
    """Why the instance was lost."""
    former_instance_id: str
    since_s: float
    """time.monotonic() of the last token, or of the loss when there was none yet."""
    until_s: float = 0.0
    """time.monotonic() of the next token; 0: there was none yet."""
    outcome: str = ""
    """How the request went on: resumed or recomputed; empty: not known yet."""
    instance_id: str = ""
    """The instance that goes on: the prefill instance, or the holder of the replica."""
    held_tokens: int = 0
    recomputed_tokens: int = 0

    def report(self, request_id: str, session: int, attempt: int) -> float:
        """Logs and counts the change at its end. Returns the seconds without a token."""
        stall_s = self.until_s - self.since_s
        metrics.STALL_S.labels(outcome=self.outcome).observe(stall_s)
        get_logger().info(
            "owner_changed",
            request_id=request_id,
            session=session,
            attempt=attempt,
            outcome=self.outcome,
            former_instance_id=self.former_instance_id,
            new_instance_id=self.instance_id,
            held_tokens=self.held_tokens,
            recomputed_tokens=self.recomputed_tokens,
            stall_s=round(stall_s, 4),
            cause=self.cause,
        )
        return stall_s
