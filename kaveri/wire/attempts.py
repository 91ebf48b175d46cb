"""What names an attempt of a request on the wire, and the limits of each name."""

from kaveri.errors import InvalidArgument

MAX_REQUEST_ID_BYTES = 128
MAX_ROUTER_ID_BYTES = 512
MAX_ATTEMPT = 2**31 - 1


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument when the id is too long."""
    _check_size("request_id", request_id, MAX_REQUEST_ID_BYTES)


def check_router_id(router_id: str) -> None:
    """Raises InvalidArgument when the id is missing or too long."""
    _check_set("router_id", router_id)
    _check_size("router_id", router_id, MAX_ROUTER_ID_BYTES)


def check_attempt(request_id: str, attempt: int, router_id: str) -> None:
    """Raises InvalidArgument, naming the field, unless the three name an attempt."""
    _check_set("request_id", request_id)
    check_request_id(request_id)
    check_router_id(router_id)
    if not 0 < attempt <= MAX_ATTEMPT:
        raise InvalidArgument("attempt", attempt, f"from 1 to {MAX_ATTEMPT}")


def _check_set(field: str, value: str) -> None:
    if not value:
        raise InvalidArgument(field, value, "set")


def _check_size(field: str, value: str, max_bytes: int) -> None:
    size = len(value.encode())
    if size > max_bytes:
        raise InvalidArgument(field, value, f"at most {max_bytes} bytes long, not {size}")
