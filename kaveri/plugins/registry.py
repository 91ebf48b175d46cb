"""Resolves names in settings: Kaveri's own, those of installed packages, and "package.module:name".

Kaveri's own names are a table of the paths that a package would write into its entry points, so that a source tree
needs no installation to know them. Both are loaded in the same way. Own names win.
"""

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
    """A name, and the path of its object."""

    name: str
    path: str
    """ "package.module:name"; the name may have dots."""
    origin: str
    """Distribution that registers it, with its version; OWN for Kaveri's own."""


@dataclass(frozen=True)
class PluginPoint:
    """The names of one setting. Reads the environment's entry points only for a name that is not Kaveri's own."""

    kind: str
    """Name for people: "engine"."""
    group: str
    """Group of entry points: "kaveri.engines"."""
    own: Mapping[str, str]
    """Kaveri's own: name to path."""
    prefix: str = ""
    """Prefix of this setting's entry points, in a group that several settings share: "decode-placement."."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Own name to the package that it needs, for names that some installations lack."""

    def registrations(self) -> Iterator[Registration]:
        """All registered names, Kaveri's own first."""
        for name, path in self.own.items():
            yield Registration(name, path, OWN)
        for entry in sorted(importlib.metadata.entry_points(group=self.group), key=lambda entry: entry.name):
            if entry.name.startswith(self.prefix):
                origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
                yield Registration(entry.name.removeprefix(self.prefix), entry.value, origin)

    def names(self) -> str:
        """All names, and the form of a path, as text for errors."""
        found = dict.fromkeys(registration.name for registration in self.registrations())
        return f"{', '.join(found)}, or package.module:name"

    def known(self, text: str) -> str:
        """Parser for `setting`: the name itself. Any but Kaveri's own is loaded, to check that it can be. Raises
        ValueError."""
        if text not in self.own:
            self.load(text)
        return text

    def load(self, name: str) -> Any:
        """Return the object of a name or a path. Raises ValueError."""
        return load_path(self.path_of(name))

    def path_of(self, name: str) -> str:
        """Return the path of a name. Raises ValueError for an unknown name, or one that two packages register."""
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
        """Return why a registration cannot be used here; empty when it can be loaded."""
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
    """Return the object at "package.module:name". Raises ValueError for any exception of the import."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"is {path!r:.{_MOST_SHOWN}}; write package.module:name")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # A module that ends the process is as wrong as one that raises.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path!r:.{_MOST_SHOWN}} cannot be loaded: {type(error).__name__}: {error}") from error
