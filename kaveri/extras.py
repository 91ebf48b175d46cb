"""Optional packages ("extras" of the kaveri distribution): checks for them, and the command that installs them."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from urllib.parse import unquote, urlsplit

from kaveri.errors import ConfigError


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where Kaveri was installed: an index, a checkout or a wheel."""
    try:
        noted = importlib.metadata.distribution("kaveri").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    if not noted:
        return f"pip install 'kaveri[{extra}]'"
    source = json.loads(noted)
    url: str = source["url"]
    if "dir_info" not in source:
        return f"pip install 'kaveri[{extra}] @ {url}'"
    editable = "-e " if source["dir_info"].get("editable") else ""
    return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"


def lacks(modules: str, extra: str) -> str:
    """Return an error text: `modules` are not installed, and the command that installs them."""
    return f"{modules} is not installed: {install_command(extra)}"


def require_modules(field: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if any of `modules`, which the extra installs, is missing. field: named in the error."""
    if missing := missing_modules(*modules):
        raise ConfigError(field, lacks(", ".join(missing), extra))


def missing_modules(*names: str) -> list[str]:
    """Return the names of the modules that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def hide_torch() -> None:
    """Keep transformers from importing torch: saves a process that only tokenizes seconds and 256 MiB."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python: there is no such module.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
