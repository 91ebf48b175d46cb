import re

import pytest

from kaveri.errors import ConfigError
from services.predictor.config import PredictorConfig
from services.prefill import forecaster
from tests.support.settings import parse_config


def parsed(*flags: str) -> PredictorConfig:
    return parse_config(PredictorConfig, "predictor", flags, {})


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max-call-prompts", "63"), "--max-call-prompts: is 63; it must be at least 64"),
        (("--max-queue", "63"), "--max-queue: is 63; it must be at least 64"),
        (("--max-queue", "255"), "--max-call-prompts: is 256; it must be at most --max-queue, 255"),
    ],
)
def test_limits_that_would_shut_prefill_out_are_refused(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parsed(*flags)


def test_the_least_limits_take_the_largest_call_of_a_prefill_instance() -> None:
    config = parsed("--max-call-prompts", "64", "--max-queue", "64")
    assert config.max_queue >= config.max_call_prompts >= forecaster._MAX_CALL_PROMPTS
