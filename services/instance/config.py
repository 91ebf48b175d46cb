"""A colocated instance's settings: those of both phases."""

from dataclasses import dataclass

from services.decode.config import BatchConfig
from services.prefill.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PromptConfig, BatchConfig):
    """Computes prompts and generates their tokens on one engine; chunks of prompts are mixed into decode steps."""

    receives: bool = True
