"""Mutates a few fields of messages at random; changes copies only."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from grpc import aio

_TOGETHER = 16
_CALL_TIMEOUT_S = 0.5
"""A valid call may wait for room, or stream for as long as it likes."""
_MOST_CHANGES = 3
_LONG = 20_000
_INTEGERS = {
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
}


class Mutator:
    def __init__(self, rng: random.Random, words: Sequence[str], secrets: Sequence[bytes]) -> None:
        """words, secrets: values that receivers know."""
        self._rng = rng
        self._words = words
        self._secrets = secrets

    def mutated(self, message: Message) -> Message:
        changed = type(message)()
        changed.CopyFrom(message)
        for _ in range(self._rng.randint(1, _MOST_CHANGES)):
            self._change(changed)
        return changed

    def _change(self, message: Message) -> None:
        field = self._rng.choice(message.DESCRIPTOR.fields)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._change_map(message, field)
        elif field.is_repeated:
            self._change_list(message, field)
        elif field.type == Field.TYPE_MESSAGE:
            present = message.HasField(field.name)
            if present and self._rng.random() < 0.2:
                message.ClearField(field.name)
            else:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self._change(inner)
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _change_map(self, message: Message, field: Field) -> None:
        entries: Any = getattr(message, field.name)
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.type == Field.TYPE_MESSAGE:
            entries[self._value(key, key.default_value)].SetInParent()
        else:
            entries[self._value(key, key.default_value)] = self._value(value, value.default_value)

    def _change_list(self, message: Message, field: Field) -> None:
        items: Any = getattr(message, field.name)
        changes: list[Callable[[], object]] = [lambda: message.ClearField(field.name)]
        if field.type == Field.TYPE_MESSAGE:
            changes.append(items.add)
            if items:
                changes += [lambda: self._change(self._rng.choice(items)), lambda: items.append(items[0])]
        else:
            changes += [
                lambda: items.append(self._value(field, 0)),
                lambda: items.extend(items[:_LONG]),
                lambda: items.extend(self._value(field, 0) for _ in range(self._rng.choice((2, 600)))),
            ]
            if items:
                index = self._rng.randrange(len(items))
                changes += [
                    lambda: items.__setitem__(index, self._value(field, items[index])),
                    lambda: items.__delitem__(index),
                ]
        self._rng.choice(changes)()

    def _value(self, field: Field, now: Any) -> Any:
        rng = self._rng
        match field.type:
            case Field.TYPE_BOOL:
                return not now
            case Field.TYPE_STRING:
                return rng.choice((*self._words, *self._words, "", "x" * _LONG, "\0", "né漢😀", "a\nb"))
            case Field.TYPE_BYTES:
                return rng.choice((*self._secrets, b"", rng.randbytes(rng.choice((1, 15, 16, 17, _LONG)))))
            case Field.TYPE_DOUBLE | Field.TYPE_FLOAT:
                return rng.choice((0.0, -1.0, 1e-9, 0.05, 1e300, -1e300, math.inf, -math.inf, math.nan, rng.random()))
            case Field.TYPE_ENUM:
                return rng.choice((0, 1, 2, 3, 99))
            case _:
                low, high = _INTEGERS[field.type]
                near = (int(now or 0) + rng.choice((-1, 1, 16)) - low) % (high - low + 1) + low
                return rng.choice((low, high, 0, 1, near, near, rng.randint(low, high), rng.randint(0, 700)))


class Attack:
    """Sends mutated calls and checks the responses."""

    def __init__(self, rng: random.Random, mutator: Mutator, not_for_callers: Sequence[grpc.StatusCode]) -> None:
        """not_for_callers: codes that no caller may receive."""
        self.answers: Counter[str] = Counter()
        self.rng = rng
        self.mutator = mutator
        self._wrong: list[str] = []
        self._not_for_callers = not_for_callers

    async def send(self, number: int) -> None:
        raise NotImplementedError

    async def call(self, name: str, method: Callable[..., Any], message: Message) -> None:
        try:
            call = method(message, timeout=_CALL_TIMEOUT_S)
            if isinstance(call, aio.UnaryStreamCall):
                await call.read()
                call.cancel()
            else:
                await call
            self.answers[f"{name} OK"] += 1
        except aio.AioRpcError as error:
            self.answers[f"{name} {error.code().name}"] += 1
            if error.code() in self._not_for_callers:
                self._wrong.append(f"{name}: {error.code().name} {error.details()} for {str(message)[:300]}")

    async def run(self, count: int, clients: int, serve: Callable[[int, int], Awaitable[None]]) -> None:
        """Send `count` messages, some at once, while clients are served. serve: checks one answer, given the numbers of
        the client and its request."""
        left, attacking = iter(range(count)), True

        async def send_some() -> None:
            for number in left:
                await self.send(number)

        async def serve_some(client: int) -> int:
            served = 0
            while attacking:
                await serve(client, served)
                served += 1
            return served

        serving = [asyncio.create_task(serve_some(client)) for client in range(clients)]
        try:
            await asyncio.gather(*(send_some() for _ in range(_TOGETHER)))
        finally:
            attacking = False
        assert min(await asyncio.gather(*serving)) > 0
        print(sorted(self.answers.items()))
        assert not self._wrong, self._wrong[:5]
        assert sum(self.answers.values()) == count
