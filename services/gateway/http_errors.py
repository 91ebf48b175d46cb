"""Kaveri's errors as OpenAI's: HTTP status, headers and body, in this one place. Pure."""

import json
import math
from dataclasses import dataclass, field

from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KaveriError,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
)

Headers = list[tuple[bytes, bytes]]
_LENGTH_FIELDS = ("prompt", "prompt.text", "prompt.messages", "params.max_tokens", "message")
"""What a router complains about when prompt and answer do not fit into the model's length."""
_PARAM_OF_FIELD = {
    "prompt.text": "prompt",
    "prompt.token_ids": "prompt",
    "prompt_token_ids": "prompt",
    "prompt.messages": "messages",
}


@dataclass(eq=False)
class HttpError(Exception):
    """A request that ends without an answer."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's `type`."""
    code: str | None = None
    param: str | None = None
    headers: Headers = field(default_factory=list)

    def body(self) -> bytes:
        """OpenAI's error object as JSON, in ASCII."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


def http_error_of(error: KaveriError, prompt_param: str = "prompt") -> HttpError:
    """The HTTP form of an error. prompt_param: the name that the prompt has in this request."""
    match error:
        case InvalidArgument():
            return _of_argument(error, prompt_param)
        case ModelNotFound():
            return HttpError(404, str(error), code="model_not_found", param="model")
        case RequestAlreadyExists():
            return HttpError(409, str(error), code="request_already_exists")
        case NoCapacity():
            headers = retry_headers(error.retry_after_s)
            return HttpError(429, str(error), "rate_limit_error", "rate_limit_exceeded", headers=headers)
        case Unauthenticated():
            # Of the routers: the client can do nothing about it. Its own key is refused by refused_key().
            return HttpError(503, f"the routers refuse this gateway: {error}", "service_unavailable", "unauthenticated")
        case Unavailable():
            headers = retry_headers(error.retry_after_s or 1.0)
            return HttpError(503, str(error), "service_unavailable", "service_unavailable", headers=headers)
        case DeadlineExceeded():
            return HttpError(504, str(error), "timeout_error", "deadline_exceeded")
        case RequestCancelled():
            # Not one of the statuses that clients try again: the request was ended on purpose.
            return HttpError(499, str(error), "request_cancelled", "request_cancelled")
        case EngineError():
            # OpenAI's clients try other errors of a server again.
            headers = [(b"x-should-retry", b"false")]
            return HttpError(500, str(error), "server_error", "engine_failed", headers=headers)
        case _:
            return HttpError(500, str(error), "server_error", "internal_error")


def refused_key(error: Unauthenticated) -> HttpError:
    """For a client without a good API key."""
    return HttpError(401, str(error), code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])


def retry_headers(retry_after_s: float) -> Headers:
    """When to try again: in whole seconds for everyone, in milliseconds for clients that read them."""
    milliseconds = max(1, math.ceil(1e3 * retry_after_s))
    return [
        (b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()),
        (b"retry-after-ms", str(milliseconds).encode()),
    ]


def _of_argument(error: InvalidArgument, prompt_param: str) -> HttpError:
    field_name = error.field
    is_length = field_name in _LENGTH_FIELDS and error.limit.startswith(("at most", "within the size limits"))
    code = "context_length_exceeded" if is_length else "invalid_value"
    if field_name in ("prompt", "message"):
        param = prompt_param
    else:
        param = _PARAM_OF_FIELD.get(field_name, field_name.removeprefix("params."))
        param = param.removeprefix("prompt.") if param.startswith("prompt.messages[") else param
    return HttpError(400, str(error).replace(field_name, param, 1), code=code, param=param)
