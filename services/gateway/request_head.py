"""Validates a request's line and headers beyond the HTTP parser's checks. Pure."""

import re

from starlette.types import Scope

from services.gateway.http_errors import HttpError

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def check_head(scope: Scope, max_header_bytes: int) -> None:
    """Validate the head; strip scheme and host from an absolute target.

    Raises HttpError. It closes the connection where peers could disagree about where the request ends.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
    if size > max_header_bytes:
        raise head_too_large(max_header_bytes)
    if not scope["http_version"].startswith("1."):
        message = f"HTTP/{scope['http_version']} is not served here; use HTTP/1.1"
        raise HttpError(505, message, code="invalid_http", headers=[(b"connection", b"close")])
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        # RFC 9112, 6.1.
        message = "Content-Length and Transfer-Encoding do not go together"
        raise HttpError(400, message, code="invalid_http", headers=[(b"connection", b"close")])
    scheme, _, rest = scope["path"].partition("://")
    if scheme in ("http", "https"):
        # RFC 9112, 3.2.2.
        scope["path"] = "/" + rest.partition("/")[2]


def head_too_large(max_header_bytes: int) -> HttpError:
    """Error for a request whose line and headers exceed the limit."""
    message = f"the request's line and headers are larger than {max_header_bytes} bytes"
    return HttpError(431, message, code="headers_too_large", headers=[(b"connection", b"close")])


def own_request_id(scope: Scope) -> str | None:
    """Return the client's X-Request-ID; None if it is missing, or unfit for logs and metadata."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value, "ascii") if _REQUEST_ID.fullmatch(value) else None
    return None
