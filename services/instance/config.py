"""A colocated instance's settings: those of both phases, without those of pushes."""

from dataclasses import dataclass

from kaveri.engine.settings import OF_TRANSFERS
from services.decode.config import BatchConfig
from services.prefill.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PromptConfig, BatchConfig):
    """Computes prompts and generates their tokens on one engine; chunks of prompts are mixed into decode steps."""

    NOT_TAKEN = OF_TRANSFERS
