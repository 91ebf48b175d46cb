"""Reads the JSON object in a request's body, with limits on its size, its depth and its parse time."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.byte_budget import ByteBudget, HeldBytes
from services.gateway import metrics
from services.gateway.config import HttpLimits
from services.gateway.connection import ClientGone, header
from services.gateway.http_errors import CLOSE, HttpError, unavailable

MAX_DEPTH = 64
"""Max nesting of objects and lists. Known requests nest at most 5 deep: a content part of a chat message."""
MAX_VALUES = 2**19
"""Max values in all lists and objects of one body together: half a million token ids."""
MAX_NESTED = 2**16
"""Max objects, lists, and fields of objects in one body together: they cost far more than other values."""
MAX_FRACTIONS = 2**12
"""Max numbers with a fraction or an exponent in one body, which are slow to parse. logit_bias needs the most."""
_INLINE_BYTES = 2**16
_COUNTED = ((b",", MAX_VALUES, "values"), (b"[{:", MAX_NESTED, "objects, lists and fields of objects"))
"""(characters that each begin one counted item, max items, name of the items) per limit."""
_TEXT_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[,\[{:]', re.DOTALL)
"""Matches a whole string, even unterminated, or a character of _COUNTED outside strings. Linear in the body's size."""
_DISCARD_S = 1.0
_DISCARD_FACTOR = 4
"""Bytes read and dropped from a refused body, in size limits: clients read the error only afterwards."""
MadeT = TypeVar("MadeT")


class BodyBudget:
    """Limit on the memory, in bytes, of all request bodies and their derived data together. Not thread-safe."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._bytes = ByteBudget("gateway", limits.max_bodies_bytes, metrics.BODY_BYTES.set)
        # A single thread: a parse holds the GIL, and the event loop must get it between two of them.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="body")

    @contextlib.contextmanager
    def hold(self, key_name: str) -> Iterator["HeldBody"]:
        """Charge a request's memory until the context ends. key_name: its API key, limited on its own; empty: none."""
        with self._bytes.hold(key_name) as held:
            yield HeldBody(self, held)

    async def parse(self, data: bytes, make: Callable[[dict[str, Any]], MadeT]) -> MadeT:
        """Parse a JSON object and return make(object); large ones on a thread. Raises HttpError, and as `make`."""
        if len(data) <= _INLINE_BYTES:
            return make(parse_object(data))
        return await asyncio.get_running_loop().run_in_executor(self._parser, lambda: make(parse_object(data)))


class HeldBody:
    """Body of one HTTP request, and the bytes charged to the BodyBudget for it."""

    def __init__(self, budget: BodyBudget, held: HeldBytes) -> None:
        self._budget = budget
        self._held = held

    def hold_more(self, size_bytes: int) -> None:
        """Charge more bytes for this request. Raises HttpError: 413 if they can never fit, 503 if not now."""
        try:
            self._held.add(size_bytes)
        except InvalidArgument as error:
            raise HttpError(413, str(error), code="request_too_large") from error
        except NoCapacity as error:
            raise unavailable(str(error), error.retry_after_s) from error

    async def read(self, scope: Scope, receive: Receive, make: Callable[[dict[str, Any]], MadeT]) -> MadeT:
        """Read the body, parse it as a JSON object and return make(object). make: may run on a thread. Raises
        HttpError, which names the limit, ClientGone on a disconnect, and as `make`."""
        within_s = self._budget.limits.slow_sender_s
        try:
            async with asyncio.timeout(within_s):
                data = await self._read(scope, receive, self._budget.limits.max_body_bytes)
        except TimeoutError as error:
            message = f"the request's body did not arrive within {within_s:g} s"
            raise HttpError(408, message, code="slow_request", headers=[CLOSE]) from error
        _check_coding(scope)
        return await self._budget.parse(data, make)

    async def _read(self, scope: Scope, receive: Receive, most_bytes: int) -> bytes:
        parts: list[bytes] = []
        stated = header(scope, b"content-length")
        if stated.isdigit() and int(stated[:20]) > most_bytes:
            if not header(scope, b"expect"):
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
    """Parse one JSON object. Raises HttpError if `data` is anything else, nested too deeply, or has too many values."""
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
    """Raise HttpError if the JSON has too many values or objects. Commas and brackets inside strings do not count."""
    for marks, most, what in _COUNTED:
        if sum(data.count(bytes((mark,))) for mark in marks) > most:
            counted = (match for match in _TEXT_OR_MARK.finditer(data) if match[0] in marks)
            if next(islice(counted, most, None), None) is not None:
                raise HttpError(400, f"the request's JSON has more than {most} {what}", code="invalid_json")


def _float_reader() -> Callable[[str], float]:
    left = iter(range(MAX_FRACTIONS))

    def read(text: str) -> float:
        if next(left, None) is None:
            message = f"the request's JSON has more than {MAX_FRACTIONS} numbers with a fraction or an exponent"
            raise HttpError(400, message, code="invalid_json")
        return float(text)

    return read


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        items = chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        level = [item for item in items if type(item) is dict or type(item) is list]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> HttpError:
    message = f"the request's JSON has more than {MAX_DEPTH} objects and lists within one another"
    return HttpError(400, message, code="invalid_json")


def _too_large(most_bytes: int) -> HttpError:
    message = f"the request's body is larger than {most_bytes} bytes"
    return HttpError(413, message, code="request_too_large", headers=[CLOSE])


def _check_coding(scope: Scope) -> None:
    names = (value for name, value in scope["headers"] if name == b"content-encoding")
    if coding := next((name for name in names if name.lower() != b"identity"), None):
        message = f"the body's Content-Encoding is {coding.decode('latin-1'):.100}; send it as it is"
        headers = [(b"accept-encoding", b"identity")]
        raise HttpError(415, message, code="unsupported_content_encoding", headers=headers)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _discard(receive: Receive, most_bytes: int) -> None:
    left_bytes = _DISCARD_FACTOR * most_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while left_bytes > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left_bytes -= len(message.get("body", b""))
