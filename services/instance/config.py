"""Settings of an engine instance: those of both phases, and which it serves first."""

from dataclasses import dataclass
from typing import ClassVar

from kaveri.domain.view import BOTH_PHASES, Phase
from services.decode.config import BatchConfig
from services.prefill.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class PhasesConfig(PromptConfig, BatchConfig):
    """Settings of an instance that can serve prefill and decode, in turn or together."""

    HELP_TITLE: ClassVar = "Phases"

    phases: tuple[Phase, ...] = BOTH_PHASES
    """Phases served from the start. No flag: the command sets it."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(PhasesConfig):
    """Computes prompts in chunks and pushes their KV cache to decode instances."""

    phases: tuple[Phase, ...] = (Phase.PREFILL,)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(PhasesConfig):
    """Takes requests with their KV cache and generates their tokens."""

    phases: tuple[Phase, ...] = (Phase.DECODE,)


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PhasesConfig):
    """Computes prompts and generates their tokens on one engine; chunks of prompts are mixed into decode steps."""
