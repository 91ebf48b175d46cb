"""What a setting's name stands for: Kaveri's own, those that installed packages register, and "package.module:name".

Kaveri's own names are a table of the same paths that a package writes into its entry points, so that a source tree
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
"""The origin of Kaveri's own."""
_MOST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Registration:
    """A name, and where its object is."""

    name: str
    path: str
    """ "package.module:name"; the name may have dots."""
    origin: str
    """The distribution that registers it, with its version; OWN for Kaveri's own."""


@dataclass(frozen=True)
class PluginPoint:
    """What one setting can name. Reads the environment's entry points only for a name that is not Kaveri's own."""

    kind: str
    """For people: "engine"."""
    group: str
    """Of entry points: "kaveri.engines"."""
    own: Mapping[str, str]
    """Name to path."""
    prefix: str = ""
    """Begins the entry points of this setting, in a group that several settings share: "decode-placement."."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Own name to the package without which it does not work, for those that not every installation has."""

    def registrations(self) -> Iterator[Registration]:
        """All that can be given by name, Kaveri's own first."""
        for name, path in self.own.items():
            yield Registration(name, path, OWN)
        for entry in sorted(importlib.metadata.entry_points(group=self.group), key=lambda entry: entry.name):
            if entry.name.startswith(self.prefix):
                origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
                yield Registration(entry.name.removeprefix(self.prefix), entry.value, origin)

    def names(self) -> str:
        """For errors: all of them, and that a path can be given."""
        found = dict.fromkeys(registration.name for registration in self.registrations())
        return f"{', '.join(found)}, or package.module:name"

    def known(self, text: str) -> str:
        """For `setting`: the name itself. Anything but Kaveri's own is loaded, to find out that it can be. Raises
        ValueError."""
        if text not in self.own:
            self.load(text)
        return text

    def load(self, name: str) -> Any:
        """The object that a name or a path stands for. Raises ValueError."""
        return load_path(self.path_of(name))

    def path_of(self, name: str) -> str:
        """Raises ValueError for a name that is neither registered nor a path, or that two packages register."""
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
        """Why a registration cannot be used here; empty when it can be loaded."""
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
    """The object at "package.module:name". Raises ValueError, whatever importing the module raises."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"is {path!r:.{_MOST_SHOWN}}; write package.module:name")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # A module that ends the process is as wrong as one that raises.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path!r:.{_MOST_SHOWN}} cannot be loaded: {type(error).__name__}: {error}") from error
