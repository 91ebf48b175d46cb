"""What the clients of a simulated cluster saw of their requests."""

from dataclasses import dataclass, field

from kaveri.client.answer import Chunk
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import KaveriError
from tests.simulation.cluster.chats import ChatReader
from tests.simulation.cluster.loop import SimulatedProcess


@dataclass(slots=True)
class RequestOutcome:
    """One sending of one request, as its client saw it. Times are the simulation's."""

    request_id: str
    router: str
    """Name of the router that it was sent to."""
    prompt: tuple[int, ...] | None
    """Token ids of the prompt; of a chat, those of the rendered template. None: sent as text."""
    text: str | None
    """The prompt, where it was sent as text."""
    params: SamplingParams
    """As sent: without a seed the router draws one. Of a chat: with the grammar of its calls."""
    started_s: float
    timeout_s: float
    process: SimulatedProcess
    """The router's life that it was sent to."""
    send_number: int = 1
    """The same request id is sent again, where the plan says so."""
    probe: bool = False
    """Sent after the faults: it must succeed."""
    chunks: list[Chunk] = field(default_factory=list)
    finish: FinishReason | None = None
    error: KaveriError | None = None
    ended_s: float | None = None
    """None: it has not ended."""
    cancelled_s: float | None = None
    """When its client cancelled it."""
    gone: bool = False
    """Its client was killed."""
    chat: ChatReader | None = None
    """What was read of a chat."""
    direct: bool = False
    """Whether its client reads answers at decode instances."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that arrived."""
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
