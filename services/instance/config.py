"""An engine instance's settings: those of both phases, and which it serves first."""

from dataclasses import dataclass
from typing import ClassVar

from kaveri.config.settings import setting
from kaveri.domain.view import BOTH_PHASES, Phase
from services.decode.config import OF_COPIES, BatchConfig
from services.prefill.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class PhasesConfig(PromptConfig, BatchConfig):
    """An instance can serve both phases, one after the other or together."""

    HELP_TITLE: ClassVar = "Phases"

    phases: tuple[Phase, ...] = BOTH_PHASES
    """Those that it serves from its start. Not a flag: the command says."""
    vllm_grpc: bool = setting(
        "whether this instance also serves vllm.grpc.engine.VllmEngine, for gateways that choose prefill and decode "
        "instances themselves; it needs the extra kaveri[vllm-grpc]",
        False,
    )
    hold_ttl_s: float = setting(
        "with --vllm-grpc: seconds that the KV of a computed prompt is kept for the decode instance to ask for it",
        30.0,
        above=0,
        most=3600.0,
    )
    hold_share: float = setting(
        "with --vllm-grpc: share of the KV pool that such prompts may have; more of them wait",
        0.5,
        above=0,
        most=1.0,
    )
    slow_reader_s: float = setting(
        "with --vllm-grpc: seconds that a client may take to read one response; then its request ends with ABORTED",
        30.0,
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(PhasesConfig):
    """Computes prompts in chunks and pushes their KV cache to decode instances."""

    # The memory for copies is resident from the start, and an instance that computes prompts has no use for it.
    NOT_TAKEN = OF_COPIES
    phases: tuple[Phase, ...] = (Phase.PREFILL,)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(PhasesConfig):
    """Takes requests with their KV cache and generates their tokens."""

    phases: tuple[Phase, ...] = (Phase.DECODE,)


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PhasesConfig):
    """Computes prompts and generates their tokens on one engine; chunks of prompts are mixed into decode steps."""
