"""Finds and checks a client's API key."""

import os
import re

from kaveri.errors import InvalidArgument

VARIABLE = "KAVERI_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]{1,500}")


def find_api_key(given: str | None) -> str:
    """Validate and return the API key to send; empty if there is none. given: the caller's key; None: use
    KAVERI_API_KEY. Raises InvalidArgument, whose text does not contain the key."""
    key = os.environ.get(VARIABLE, "") if given is None else given
    if (key or given is not None) and not (isinstance(key, str) and _KEY.fullmatch(key)):
        field = VARIABLE if given is None else "api_key"
        raise InvalidArgument(field, "what was given", "1 to 500 visible ASCII characters")
    return key


def key_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata that authenticates a call with `key`; empty for an empty key."""
    return (("authorization", f"Bearer {key}"),) if key else ()
