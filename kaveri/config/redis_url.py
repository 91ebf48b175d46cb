"""Parses Redis URLs: the database number, and a form without passwords for display."""

import re
from urllib.parse import parse_qs, urlsplit

_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
"""Valkey's URL schemes and the equivalent schemes of Redis."""


def client_url(url: str) -> str:
    """Replace a URL's scheme valkey:// or valkeys:// with the equivalent that redis-py accepts."""
    scheme, separator, rest = url.partition("://")
    return f"{_SCHEMES.get(scheme, scheme)}{separator}{rest}"


def database_of(url: str) -> int:
    """Return the database number of a Redis URL; 0 if it has none. Raises ValueError for an invalid number."""
    parts = urlsplit(client_url(url))
    named = parse_qs(parts.query).get("db", [""])[0]
    if not named and parts.scheme in ("redis", "rediss"):
        named = parts.path.strip("/")
    if not re.fullmatch(r"[0-9]{0,9}", named):
        raise ValueError("its database is no number")
    return int(named or 0)


def shown(url: str) -> str:
    """Return a Redis URL without user, password and options, for display."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***" if "@" in url else url
    host, slash, path = re.split(r"[?#]", rest.rpartition("@")[2])[0].partition("/")
    authority = re.split(r"[/?#]", rest)[0]
    if rest.count("@") == 0:
        return f"{scheme}://{host}{slash}{path}"
    if rest.count("@") == 1 and "@" in authority:
        return f"{scheme}://***@{host}{slash}{path}"
    # An unescaped special character in the password: its end cannot be determined.
    return f"{scheme}://***"
