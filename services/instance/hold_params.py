"""kv_transfer_params_json: what the two legs of a disaggregated request say of its KV.

Gateways carry it from the prefill leg's answer to the decode leg and do not read it. Its names are those of vLLM's NIXL
connector where they mean the same.
"""

import json
import re
from dataclasses import dataclass

from kaveri.addresses import is_address, join_address, split_address
from kaveri.errors import InvalidArgument
from services.prefill.holds import HOLD_ID_BYTES, HoldName

FIELD = "kv_transfer_params_json"
CONNECTOR = "NixlConnector"
"""The form that gateways know it by: they mark the prefill leg then, and carry over what it answers."""
_MAX_CHARACTERS = 2_048
_HEX_ID = re.compile(rf"[0-9a-f]{{{2 * HOLD_ID_BYTES}}}")
_MAX_INCARNATION = 2**64
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
"""A name or an address, and none of gRPC's other kinds of targets."""


class HoldWanted:
    """Asks the prefill leg to hold the prompt's KV."""


@dataclass(frozen=True, slots=True)
class HoldAt:
    """A hold, and where it is."""

    instance_id: str
    address: str
    """"host:port" of the prefill instance."""
    name: HoldName


def write_hold(hold: HoldAt) -> str:
    """The JSON for the decode leg."""
    host, port = split_address(hold.address)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": hold.instance_id,
        "remote_host": host,
        "remote_port": port,
        # Text: not every reader of JSON keeps whole numbers above 2^53.
        "remote_incarnation": str(hold.name.incarnation),
        "remote_hold_id": hold.name.hold_id.hex(),
    }
    return json.dumps(params, separators=(",", ":"))


def read_hold(text: str) -> HoldWanted | HoldAt | None:
    """None: the request has no other leg. Raises InvalidArgument, naming the key."""
    if not text:
        return None
    if len(text) > _MAX_CHARACTERS:
        raise InvalidArgument(FIELD, f"{len(text)} characters", f"at most {_MAX_CHARACTERS} characters")
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(FIELD, text, "a JSON object") from error
    if not isinstance(params, dict):
        raise InvalidArgument(FIELD, text, "a JSON object")
    if params.get("do_remote_decode") is True:
        return HoldWanted()
    if params.get("do_remote_prefill") is not True:
        if params:
            limit = "an object with do_remote_decode or do_remote_prefill true, or left out"
            raise InvalidArgument(FIELD, text, limit)
        return None
    instance_id = _text(params, "remote_engine_id")
    hold_id, incarnation = _text(params, "remote_hold_id"), _text(params, "remote_incarnation")
    if not _HEX_ID.fullmatch(hold_id):
        raise _wrong(
            "remote_hold_id", hold_id, f"{2 * HOLD_ID_BYTES} hexadecimal digits, as Kaveri's prefill leg gives it"
        )
    if not (incarnation.isascii() and incarnation.isdecimal() and int(incarnation) < _MAX_INCARNATION):
        raise _wrong("remote_incarnation", incarnation, "a whole number below 2^64, as text")
    host, port = _text(params, "remote_host"), params.get("remote_port")
    if not _HOST.fullmatch(host):
        raise _wrong("remote_host", host, "the name or the address of a prefill instance")
    address = join_address(host, port if type(port) is int else 0)
    if type(port) is not int or not is_address(address):
        raise _wrong("remote_port", address, "with remote_host, an address of a prefill instance")
    return HoldAt(instance_id, address, HoldName(int(incarnation), bytes.fromhex(hold_id)))


def _text(params: dict[str, object], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _wrong(key, value, "given, as Kaveri's prefill leg gives it")
    return value


def _wrong(key: str, value: object, limit: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}.{key}", value, limit)
