"""Turns a call's arguments into a GenerateRequest, refusing locally what no router could accept. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kaveri.errors import InvalidArgument
from kaveri.rpc.messages import params_to_proto
from kaveri.sampling import SamplingParams
from kaveri.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Who speaks: "system", "user" or "assistant" for most chat templates."""
    content: str
    """What is said."""


MessageLike = Message | Mapping[str, str]
"""A Message, or a mapping with the keys role and content."""


def build_request(
    prompt: str | None,
    prompt_token_ids: Sequence[int] | None,
    messages: Sequence[MessageLike] | None,
    params: SamplingParams | None,
    model: str | None,
    request_id: str,
) -> inference_pb2.GenerateRequest:
    """The proto message of one request. Raises InvalidArgument unless exactly one kind of prompt is given."""
    kinds = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) != 1:
        raise InvalidArgument("prompt", " and ".join(given) or None, f"exactly one of {', '.join(kinds)}")
    request = inference_pb2.GenerateRequest(model=model or "", request_id=request_id)
    # protobuf refuses what its types cannot hold: negative token ids, text that is no Unicode.
    try:
        if prompt is not None:
            request.text = prompt
        elif prompt_token_ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt_token_ids)
        elif messages is not None:
            request.messages.SetInParent()
            request.messages.messages.extend(_message_to_proto(message) for message in messages)
    except KeyError as error:
        raise InvalidArgument(given[0], kinds[given[0]], "messages with role and content each") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(given[0], kinds[given[0]], f"representable: {error}") from error
    if params is not None:
        try:
            request.params.CopyFrom(params_to_proto(params))
        except (TypeError, ValueError) as error:
            raise InvalidArgument("params", params, f"representable: {error}") from error
    return request


def check_timeout(timeout_s: float | None) -> None:
    """Raises InvalidArgument unless `timeout_s` is None (no limit) or a positive number of seconds."""
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidArgument("timeout_s", timeout_s, "a positive number of seconds, or None")


def _message_to_proto(message: MessageLike) -> inference_pb2.Message:
    if isinstance(message, Message):
        return inference_pb2.Message(role=message.role, content=message.content)
    return inference_pb2.Message(role=message["role"], content=message["content"])
