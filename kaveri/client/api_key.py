"""The API key of a client."""

import os
import re

from kaveri.errors import InvalidArgument

VARIABLE = "KAVERI_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]{1,500}")


def find_api_key(given: str | None) -> str:
    """The key to send; empty: none. given: None: what the variable says.

    Raises InvalidArgument, which does not show the key.
    """
    key = os.environ.get(VARIABLE, "") if given is None else given
    if (key or given is not None) and not (isinstance(key, str) and _KEY.fullmatch(key)):
        field = VARIABLE if given is None else "api_key"
        raise InvalidArgument(field, "what was given", "1 to 500 visible ASCII characters")
    return key


def check_direct(direct: bool, api_key: str | None) -> None:
    """Raises InvalidArgument when a key is given to a client that would read at decode instances. api_key: None: the
    variable counts, which is also set for commands and so refuses nothing."""
    if direct and api_key:
        limit = "False with api_key: a public port sends all tokens itself, and decode instances take certificates"
        raise InvalidArgument("direct", True, limit)


def key_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """What a call carries; key: empty: nothing."""
    return (("authorization", f"Bearer {key}"),) if key else ()
