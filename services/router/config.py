"""The router's settings; read from flags and KAVERI_* variables by kaveri.rpc.process."""

from dataclasses import dataclass

from kaveri.config.settings import present, setting
from kaveri.models import KAVERI_TINY
from kaveri.policy.placement import PlacementPolicy
from kaveri.rpc.process import ServiceConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """Takes requests from clients, places them on prefill instances, and relays the tokens of decode instances."""

    model: str = setting(
        "model to serve: a path, a hub id or a bundled name; its tokenizer is loaded here", KAVERI_TINY, present
    )
    served_model_name: str = setting("name under which the model is asked for; empty: the value of --model", "")
    max_requests: int = setting("requests in flight at once; more are refused with RESOURCE_EXHAUSTED", 1024, least=1)
    max_reattaches_per_s: float = setting(
        "clients that may re-attach a second, after a burst of --max-requests; more are refused with "
        "RESOURCE_EXHAUSTED, and try again",
        200.0,
        above=0,
    )
    default_timeout_s: float = setting(
        "seconds for requests whose caller set no deadline", 600.0, above=0, most=7 * 86_400.0
    )
    placement_policy: PlacementPolicy = setting(  # noqa: RUF009 - it is a field
        "how a prefill instance is chosen: power-of-two, least-loaded, round-robin or random",
        PlacementPolicy.POWER_OF_TWO,
    )
    max_attempts: int = setting(
        "placements of one request that may be lost before it fails with its last error", 8, least=1
    )
    unavailable_after_s: float = setting(
        "seconds that a request waits for an instance when there is none, or none that can be reached", 10.0, least=0
    )
    slow_reader_s: float = setting(
        "seconds that a client may take to read one response; then its request ends with ABORTED", 30.0, above=0
    )
    suspect_after_s: float = setting(
        "seconds without a sign of life from an instance after which its requests go on elsewhere; one that decodes "
        "sends such signs, one that computes prompts is asked for them",
        0.5,
        least=0.2,
        most=60.0,
    )
    monitor_interval_s: float = setting(
        "seconds between two broadcasts of all loads to prefill instances, by the router that leads; TetriInfer's 0.1; "
        "it renews its lead with them, so at most half of the lead's lease",
        0.1,
        above=0,
        most=0.5,
    )

    @property
    def model_name(self) -> str:
        """The name under which callers and the cluster know the model."""
        return self.served_model_name or self.model
