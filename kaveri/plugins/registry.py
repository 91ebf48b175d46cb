"""Resolves the names of plugins in settings: Kaveri's own, those that installed packages register as entry points, and
"package.module:name". Kaveri's own are a table, so that a source tree needs no installation, and take precedence."""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OWN = "kaveri"
"""Origin of Kaveri's own names."""
_MOST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Registration:
    """Registered plugin: its name, and the import path of its object."""

    name: str
    path: str
    """ "package.module:name"; the name may have dots."""
    origin: str
    """Distribution that registers it, with its version; OWN for Kaveri's own."""


@dataclass(frozen=True)
class PluginPoint:
    """Plugins that one setting can name. Reads installed entry points only for a name that is not Kaveri's own."""

    kind: str
    """Kind of plugin, for errors: "engine"."""
    group: str
    """Group of entry points: "kaveri.engines"."""
    own: Mapping[str, str]
    """Import paths of Kaveri's own plugins, by name."""
    prefix: str = ""
    """Prefix of this setting's entry points, in a group that several settings share: "decode-placement."."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Packages that Kaveri's own plugins need and may lack, by plugin name."""

    def registrations(self) -> Iterator[Registration]:
        """Yield all registered plugins, Kaveri's own first."""
        for name, path in self.own.items():
            yield Registration(name, path, OWN)
        for entry in sorted(importlib.metadata.entry_points(group=self.group), key=lambda entry: entry.name):
            if entry.name.startswith(self.prefix):
                origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
                yield Registration(entry.name.removeprefix(self.prefix), entry.value, origin)

    def names(self) -> str:
        """List all plugin names, and the form of an import path, as text for errors."""
        found = dict.fromkeys(registration.name for registration in self.registrations())
        return f"{', '.join(found)}, or package.module:name"

    def known(self, text: str) -> str:
        """Validate a plugin name given as a setting: loads it unless it is Kaveri's own. Raises ValueError."""
        if text not in self.own:
            self.load(text)
        return text

    def load(self, name: str) -> Any:
        """Import the object of a plugin, given its name or import path. Raises ValueError."""
        return load_path(self.path_of(name))

    def path_of(self, name: str) -> str:
        """Return a plugin's import path. Raises ValueError for a name that is unknown or registered by two packages."""
        if name in self.own:
            return self.own[name]
        if ":" in name:
            return name
        found = [entry for entry in self.registrations() if entry.name == name]
        if not found:
            raise ValueError(f"is {name!r:.{_MOST_SHOWN}}; choose {self.names()}")
        if len({entry.path for entry in found}) > 1:
            packages = " and ".join(entry.origin for entry in found)
            raise ValueError(f"is {name!r}, which {packages} register; give one's package.module:name")
        return found[0].path

    def fault(self, registration: Registration) -> str:
        """Return the reason why a plugin cannot be used; empty if it can be loaded."""
        if registration.origin == OWN:
            needed = self.needs.get(registration.name)
            if needed is not None and importlib.util.find_spec(needed) is None:
                return f"needs the package {needed}"
        elif registration.name in self.own:
            return "not used: Kaveri's own has this name"
        try:
            self.load(registration.name)
        except ValueError as error:
            return str(error)
        return ""


def load_path(path: str) -> Any:
    """Import the object at "package.module:name". Raises ValueError for any exception of the import."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"is {path!r:.{_MOST_SHOWN}}; write package.module:name")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # A module that ends the process is as wrong as one that raises.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path!r:.{_MOST_SHOWN}} cannot be loaded: {type(error).__name__}: {error}") from error
