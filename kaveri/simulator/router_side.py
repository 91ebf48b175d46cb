"""Interface by which simulated instances call their router."""

from typing import Protocol

from kaveri.errors import KaveriError, NoCapacity
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.table import RunTable


class RouterSide(Protocol):
    """Calls of instances to the router."""

    table: RunTable

    def started(self, attempt: SimulatedAttempt) -> None:
        """Its first chunk has begun."""

    def drew_first(self, attempt: SimulatedAttempt, drawn_s: float) -> None:
        """Prefill has drawn a token."""

    def handed_over(self, attempt: SimulatedAttempt, landed_s: float) -> None:
        """Decode has the request."""

    def finished(self, attempt: SimulatedAttempt, end_s: float, first_step_s: float, preemptions: int) -> None:
        """The answer is complete: it has drawn its last token."""

    def refused(self, attempt: SimulatedAttempt, error: NoCapacity) -> None:
        """The prefill instance's queue is full."""

    def unreached(self, attempt: SimulatedAttempt) -> None:
        """Fails since there is no prefill instance at that address now."""

    def decode_lost(self, attempt: SimulatedAttempt) -> None:
        """The decode instance that had the request has died."""

    def both_lost(self, attempt: SimulatedAttempt) -> None:
        """The instance of both phases that decoded the request has died."""

    def lost(self, attempt: SimulatedAttempt, error: KaveriError) -> None:
        """The attempt has ended without an answer."""

    def resumed(self, attempt: SimulatedAttempt, held_tokens: int) -> None:
        """Resumed at its copy, with the KV of `held_tokens` tokens."""

    def not_resumed(self, attempt: SimulatedAttempt) -> None:
        """The holder of its copy refuses to resume it."""

    def resume_lost(self, attempt: SimulatedAttempt) -> None:
        """The holder of its copy has died before it was resumed."""

    def goes_on(self, attempt: SimulatedAttempt, drawn_s: float) -> None:
        """A resumed request has drawn a token again."""

    def wake_at_broadcast(self) -> None:
        """Wake a prefill instance at the next broadcast."""
