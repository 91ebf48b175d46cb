"""Settings of `kaveri profile`, read from flags and KAVERI_* variables."""

from dataclasses import dataclass

from kaveri.config.settings import setting
from kaveri.engine.settings import OF_TRANSFERS, EngineSettings
from kaveri.latency.saturation import DEFAULT_SHARE
from kaveri.profiling.plan import MAX_CHUNK_TOKENS


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(EngineSettings):
    """Measures prefill and decode steps of an engine on this machine, and writes a profile for its services.

    Use the same model, dtype, device, KV memory and OMP_NUM_THREADS as the services; `kaveri up` gives each engine one
    thread unless OMP_NUM_THREADS is set. Run nothing else meanwhile.
    """

    NOT_TAKEN = ("chunk_tokens", "profile", *OF_TRANSFERS)
    out: str = setting("profile to write, JSON")
    plot: str = setting("also draw it: a file that ends in .svg, .png or .pdf; empty: no plot", "")
    max_chunk_tokens: int = setting("largest chunk that is measured", MAX_CHUNK_TOKENS, least=1)
    saturation_share: float = setting(
        "a chunk saturates the hardware when its throughput is at least this share of the best",
        DEFAULT_SHARE,
        above=0,
        most=1,
    )
    quick: bool = setting("fewer steps, each measured less often: faster and less accurate", False)
    log_level: str = setting(
        "least level of log lines: debug, info, warning or error",
        "warning",
        choices=("debug", "info", "warning", "error"),
    )
