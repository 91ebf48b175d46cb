"""Reads the JSON object that a request carries, within limits on its size, its depth and the time it takes."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import Receive, Scope

from services.gateway import metrics
from services.gateway.http_errors import HttpError, retry_headers

MAX_DEPTH = 16
"""Of objects and lists within one another. The deepest that is known is 5: a part of a message."""
_DISCARD_S = 1.0
_DISCARD_FACTOR = 4
"""A client that sends too much reads its answer only afterwards: this many times the limit is read and thrown away."""
_RETRY_AFTER_S = 1.0


class ClientGone(Exception):
    """The client has closed its connection."""


class BodyBudget:
    """The bytes of all bodies that are held, and of the reports on prompts that are asked for. For one event loop."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, slow_sender_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_bodies_bytes = max_bodies_bytes
        self._slow_sender_s = slow_sender_s
        self._held_bytes = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator["HeldBody"]:
        """A body of a request; it counts while the context lasts."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self._add(-body.size_bytes)

    @property
    def limits(self) -> tuple[int, float]:
        """Bytes of one body, and seconds for it to arrive."""
        return self._max_body_bytes, self._slow_sender_s

    def take(self, size_bytes: int, held_bytes: int) -> None:
        """held_bytes: what the request has taken before. Raises HttpError when there is no room."""
        if held_bytes + size_bytes > self._max_bodies_bytes:
            message = f"the request needs {held_bytes + size_bytes} bytes, with the reports on its prompts"
            limit = f"at most {self._max_bodies_bytes} (--max-bodies-bytes)"
            raise HttpError(413, f"{message}: {limit}", code="request_too_large")
        if self._held_bytes + size_bytes > self._max_bodies_bytes:
            held = f"the requests in flight hold {self._held_bytes} of {self._max_bodies_bytes} bytes"
            message = f"{held} (--max-bodies-bytes), and this one needs {size_bytes} more"
            raise HttpError(
                429, message, "rate_limit_error", "rate_limit_exceeded", headers=retry_headers(_RETRY_AFTER_S)
            )
        self._add(size_bytes)

    def _add(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        metrics.BODY_BYTES.set(self._held_bytes)


class HeldBody:
    """One body; see BodyBudget.hold."""

    def __init__(self, budget: BodyBudget) -> None:
        self.size_bytes = 0
        self._budget = budget

    def hold_more(self, size_bytes: int) -> None:
        """Counts what else the request takes. Raises HttpError when there is no room."""
        self._budget.take(size_bytes, self.size_bytes)
        self.size_bytes += size_bytes

    async def read_json(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """The object. Raises HttpError, naming the limit, and ClientGone."""
        most_bytes, within_s = self._budget.limits
        try:
            async with asyncio.timeout(within_s):
                data = await self._read(scope, receive, most_bytes)
        except TimeoutError as error:
            message = f"the request's body did not arrive within {within_s:g} s"
            raise HttpError(408, message, code="slow_request", headers=[(b"connection", b"close")]) from error
        return parse_object(data)

    async def _read(self, scope: Scope, receive: Receive, most_bytes: int) -> bytes:
        parts: list[bytes] = []
        if _stated_size(scope) > most_bytes:
            if not any(name == b"expect" for name, _ in scope["headers"]):
                await _discard(receive, most_bytes)
            raise _too_large(most_bytes)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if self.size_bytes + len(part) > most_bytes:
                parts.clear()
                await _discard(receive, most_bytes)
                raise _too_large(most_bytes)
            self.hold_more(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """Raises HttpError unless it is one JSON object that is not too deep."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise HttpError(400, f"the request's body is not JSON: {error!s:.200}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise HttpError(400, "the request's body is not a JSON object", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += [
                item
                for item in (each.values() if type(each) is dict else each)
                if type(item) is dict or type(item) is list
            ]
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> HttpError:
    message = f"the request's JSON has more than {MAX_DEPTH} objects and lists within one another"
    return HttpError(400, message, code="invalid_json")


def _too_large(most_bytes: int) -> HttpError:
    message = f"the request's body is larger than {most_bytes} bytes"
    return HttpError(413, message, code="request_too_large", headers=[(b"connection", b"close")])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _stated_size(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


async def _discard(receive: Receive, most_bytes: int) -> None:
    give_up_s = time.monotonic() + _DISCARD_S
    left_bytes = _DISCARD_FACTOR * most_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(give_up_s - time.monotonic()):
            while left_bytes > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left_bytes -= len(message.get("body", b""))
