"""Reads a request's JSON object, with limits on its size, its depth and its parse time."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.byte_budget import ByteBudget, HeldBytes
from services.gateway import metrics
from services.gateway.http_errors import HttpError, retry_headers

MAX_DEPTH = 16
"""Max nesting of objects and lists. The deepest known use is 5: a part of a message."""
MAX_VALUES = 2**19
"""Max values in all lists and objects together: half a million token ids."""
MAX_NESTED = 2**16
"""Max objects, lists, and fields of objects together: they cost far more than other values."""
MAX_FRACTIONS = 2**12
"""Max numbers with a fraction or an exponent, which are slow to parse. logit_bias needs the most."""
_INLINE_BYTES = 2**16
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_COUNTED = tuple(
    (marks, most, what, re.compile(rb"(?:[^\"%s]++|%s)*+[%s]" % (marks, _TEXT, marks), re.DOTALL))
    for marks, most, what in (
        (rb",", MAX_VALUES, "values"),
        (rb"\[{:", MAX_NESTED, "objects, lists and fields of objects"),
    )
)
"""Per limit: the characters that precede a counted value, and a regular expression for the next one outside of
texts."""
_DISCARD_S = 1.0
_DISCARD_FACTOR = 4
"""A client that sends too much reads its answer only afterwards: this many times the limit is read and discarded."""
MadeT = TypeVar("MadeT")


class ClientGone(Exception):
    """The client has closed its connection."""


class BodyBudget:
    """Byte budget of all bodies and of other memory of their requests. Not thread-safe: for one event loop."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, slow_sender_s: float) -> None:
        self.max_body_bytes = max_body_bytes
        self.slow_sender_s = slow_sender_s
        self._bytes = ByteBudget("gateway", max_bodies_bytes, metrics.BODY_BYTES.set)
        # One thread: a parse holds the GIL, and the event loop must get it between two of them.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="body")

    @contextlib.contextmanager
    def hold(self, key_name: str) -> Iterator["HeldBody"]:
        """Account for a request's body until the context ends. key_name: of the request's API key; empty: none."""
        with self._bytes.hold(key_name) as held:
            yield HeldBody(self, held)

    async def parse(self, data: bytes, make: Callable[[dict[str, Any]], MadeT]) -> MadeT:
        """Apply `make` to the parsed JSON object; for a large one on a thread."""
        if len(data) <= _INLINE_BYTES:
            return make(parse_object(data))
        work = asyncio.get_running_loop().run_in_executor(self._parser, lambda: make(parse_object(data)))
        return await work


class HeldBody:
    """One body; see BodyBudget.hold."""

    def __init__(self, budget: BodyBudget, held: HeldBytes) -> None:
        self._budget = budget
        self._held = held

    def hold_more(self, size_bytes: int) -> None:
        """Account for additional memory of the request. Raises HttpError when there is no room."""
        try:
            self._held.add(size_bytes)
        except InvalidArgument as error:
            raise HttpError(413, str(error), code="request_too_large") from error
        except NoCapacity as error:
            headers = retry_headers(error.retry_after_s)
            raise HttpError(503, str(error), "service_unavailable", "service_unavailable", headers=headers) from error

    async def read(self, scope: Scope, receive: Receive, make: Callable[[dict[str, Any]], MadeT]) -> MadeT:
        """Read the body and apply `make` to the JSON object. make: extracts what it needs, and may run on a thread.
        Raises HttpError, naming the limit, ClientGone, and as make."""
        within_s = self._budget.slow_sender_s
        try:
            async with asyncio.timeout(within_s):
                data = await self._read(scope, receive, self._budget.max_body_bytes)
        except TimeoutError as error:
            message = f"the request's body did not arrive within {within_s:g} s"
            raise HttpError(408, message, code="slow_request", headers=[(b"connection", b"close")]) from error
        _check_coding(scope)
        return await self._budget.parse(data, make)

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
            if self._held.size_bytes + len(part) > most_bytes:
                parts.clear()
                await _discard(receive, most_bytes)
                raise _too_large(most_bytes)
            self.hold_more(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object. Raises HttpError if it is anything else, too deep, or of too many values."""
    _check_counts(data)
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant, parse_float=_float_reader())
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise HttpError(400, f"the request's body is not JSON: {error!s:.200}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise HttpError(400, "the request's body is not a JSON object", code="invalid_json")
    _check_depth(value)
    return value


def _check_counts(data: bytes) -> None:
    """Raise HttpError if there are too many values. Contents of texts do not count."""
    for marks, most, what, following in _COUNTED:
        if sum(data.count(bytes((mark,))) for mark in marks) <= most:
            continue
        place = 0
        for _ in range(most + 1):
            found = following.match(data, place)
            if found is None:
                break
            place = found.end()
        else:
            raise HttpError(400, f"the request's JSON has more than {most} {what}", code="invalid_json")


def _float_reader() -> Callable[[str], float]:
    left = MAX_FRACTIONS

    def read(text: str) -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise HttpError(
                400,
                f"the request's JSON has more than {MAX_FRACTIONS} numbers with a fraction or an exponent",
                code="invalid_json",
            )
        return float(text)

    return read


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


def _check_coding(scope: Scope) -> None:
    """Raise HttpError for a compressed body."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            message = f"the body's Content-Encoding is {value.decode('latin-1'):.100}; send it as it is"
            headers = [(b"accept-encoding", b"identity")]
            raise HttpError(415, message, code="unsupported_content_encoding", headers=headers)


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
