import importlib.metadata
import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.extras import install_command, require_modules


class _Distribution:
    def __init__(self, noted: Mapping[str, Any] | None) -> None:
        self._noted = noted

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._noted is None else json.dumps(self._noted)


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'kaveri[gateway]'"),
        ({"url": "file:///my%20source", "dir_info": {"editable": True}}, "pip install -e '/my source[gateway]'"),
        ({"url": "file:///src/kaveri", "dir_info": {}}, "pip install '/src/kaveri[gateway]'"),
        (
            {"url": "file:///w/kaveri-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'kaveri[gateway] @ file:///w/kaveri-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_the_command_names_the_source(
    noted: Mapping[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: _Distribution(noted))
    assert install_command("gateway") == command


def test_a_missing_module_is_one_line_about_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^--plot: no_such_module is not installed: pip install .*predictor\]'$"):
        require_modules("--plot", "predictor", "sys", "no_such_module")


def test_the_engine_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # None is how Python says, to `import` and to find_spec alike, that there is no such module.
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"torch is not installed: pip install .*transformers"):
        build_engine(EngineSettings(engine="transformers"))
