"""A colocated instance's settings: those of both phases, without those of what passes between instances."""

from dataclasses import dataclass

from services.decode.config import BatchConfig
from services.prefill.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PromptConfig, BatchConfig):
    """Computes prompts and generates their tokens on one engine; chunks of prompts ride in the decode steps."""
