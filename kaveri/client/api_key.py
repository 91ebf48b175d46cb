"""Finds and checks a client's API key."""

import os
import re

from kaveri.errors import InvalidArgument

VARIABLE = "KAVERI_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]{1,500}")


def find_api_key(given: str | None) -> str:
    """Return the API key to send; empty: none. given: the caller's key; None: use the environment variable. Raises
    InvalidArgument, which does not show the key."""
    key = os.environ.get(VARIABLE, "") if given is None else given
    if (key or given is not None) and not (isinstance(key, str) and _KEY.fullmatch(key)):
        field = VARIABLE if given is None else "api_key"
        raise InvalidArgument(field, "what was given", "1 to 500 visible ASCII characters")
    return key


def key_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with this key, which may be empty."""
    return (("authorization", f"Bearer {key}"),) if key else ()
