"""Settings of the predictor service; read from flags and KAVERI_* variables by kaveri.rpc.process."""

from dataclasses import dataclass

from kaveri.config.settings import present, setting
from kaveri.errors import ConfigError
from kaveri.models import KAVERI_TINY
from kaveri.rpc.process import ServiceConfig

_LEAST_CALL_PROMPTS = 64
"""Lower bound on prompts per call: prefill instances send this many at once."""


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(ServiceConfig):
    """Predicts how long the answers of one served model will be."""

    model: str = setting(
        "model whose answers are predicted; the predictor must be trained for it", KAVERI_TINY, present
    )
    served_model_name: str = setting("name under which that model is asked for; empty: the value of --model", "")
    predictor: str = setting("the predictor: a folder or a bundled name; empty: the one bundled for --model", "")
    device: str = setting("where the predictor computes: cpu, cuda or cuda:N", "cpu")
    batch_prompts: int = setting("most prompts that are computed together", 16, least=1)
    long_prompt_tokens: int = setting(
        "a longer prompt is computed alone, so that short ones are not padded to its length", 512, least=1
    )
    max_queue: int = setting(
        "prompts that wait; more are refused with RESOURCE_EXHAUSTED. At least --max-call-prompts, or a full call "
        "would always be refused",
        1024,
        least=_LEAST_CALL_PROMPTS,
    )
    max_call_prompts: int = setting(
        f"prompts of one call; more are refused with INVALID_ARGUMENT. At least {_LEAST_CALL_PROMPTS}: a prefill "
        "instance sends that many at once",
        256,
        least=_LEAST_CALL_PROMPTS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_call_prompts > self.max_queue:
            reason = f"is {self.max_call_prompts}; it must be at most --max-queue, {self.max_queue}"
            raise ConfigError("--max-call-prompts", reason)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def predictor_path(self) -> str:
        """Folder or bundled name of the length predictor."""
        return self.predictor or self.model
