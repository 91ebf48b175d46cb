"""Messages with a few fields that are not what a peer would send. Drawn from a generator; changes copies only."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_MOST_CHANGES = 3
_LONG = 20_000
_INTEGERS = {
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
}


class Mutator:
    """Changes messages."""

    def __init__(self, rng: random.Random, words: Sequence[str], secrets: Sequence[bytes]) -> None:
        """words: ids that mean something to the receivers. secrets: as those."""
        self._rng = rng
        self._words = words
        self._secrets = secrets

    def mutated(self, message: Message) -> Message:
        """A copy of the message with up to three changes."""
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
