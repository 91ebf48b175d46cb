"""Maps each KaveriError to an HTTP status, headers and OpenAI's error body; nothing else does. Pure."""

import ast
import contextlib
import json
import math
import re
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
CLOSE = (b"connection", b"close")
_LENGTH_FIELDS = ("prompt", "prompt.text", "prompt.messages", "params.max_tokens", "message")
"""Fields that routers name when prompt and answer together exceed the model's context length."""
_SHOWN_CHARACTERS = 120
_TOO_LONG = re.compile(r"at most \d+( tokens| bytes| messages|:)|within the size limits")
_TEMPLATE_ARGUMENTS = "prompt.template_arguments"
_PARAM_OF_FIELD = {
    "prompt.text": "prompt",
    "prompt.token_ids": "prompt",
    "prompt_token_ids": "prompt",
    "prompt.messages": "messages",
    f"{_TEMPLATE_ARGUMENTS}.reasoning_effort": "reasoning_effort",
}


@dataclass(eq=False)
class HttpError(Exception):
    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Headers = field(default_factory=list)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


def is_too_long(error: KaveriError) -> bool:
    """Return True if the error says that prompt and answer exceed the model's context length."""
    return (
        isinstance(error, InvalidArgument)
        and error.field in _LENGTH_FIELDS
        and _TOO_LONG.match(error.limit) is not None
    )


def http_error_of(error: KaveriError, prompt_param: str = "prompt", max_model_len: int = 0) -> HttpError:
    """Convert an error to its HTTP form. prompt_param: this request's name for the prompt: "prompt" or "messages".
    max_model_len: the model's context length in tokens, if is_too_long(error); 0: unknown."""
    match error:
        case InvalidArgument():
            return _of_argument(error, prompt_param, max_model_len)
        case ModelNotFound():
            return HttpError(404, str(error), code="model_not_found", param="model")
        case RequestAlreadyExists():
            return HttpError(409, str(error), code="request_already_exists")
        case NoCapacity():
            headers = _retry_headers(error.retry_after_s)
            return HttpError(429, str(error), "rate_limit_error", "rate_limit_exceeded", headers=headers)
        case Unauthenticated():
            # An error of the routers' authentication: the client cannot fix it.
            return HttpError(503, f"the routers refuse this gateway: {error}", "service_unavailable", "unauthenticated")
        case Unavailable():
            return unavailable(str(error), error.retry_after_s or 1.0)
        case DeadlineExceeded():
            return HttpError(504, str(error), "timeout_error", "deadline_exceeded")
        case RequestCancelled():
            # Not a status that clients retry: the request was ended on purpose.
            return HttpError(499, str(error), "request_cancelled", "request_cancelled")
        case EngineError():
            # OpenAI's clients retry other server errors.
            headers = [(b"x-should-retry", b"false")]
            return HttpError(500, str(error), "server_error", "engine_failed", headers=headers)
        case _:
            return HttpError(500, str(error), "server_error", "internal_error")


def unavailable(message: str, retry_after_s: float, code: str = "service_unavailable") -> HttpError:
    """Build a 503 error for a request that may succeed after `retry_after_s` seconds."""
    return HttpError(503, message, "service_unavailable", code, headers=_retry_headers(retry_after_s))


def _retry_headers(retry_after_s: float) -> Headers:
    milliseconds = max(1, math.ceil(1e3 * retry_after_s))
    return [
        (b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()),
        (b"retry-after-ms", str(milliseconds).encode()),
    ]


def _of_argument(error: InvalidArgument, prompt_param: str, max_model_len: int) -> HttpError:
    field_name = error.field
    if field_name in ("prompt", "message"):
        param = prompt_param
    else:
        param = _PARAM_OF_FIELD.get(field_name, field_name.removeprefix("params."))
        param = param.removeprefix("prompt.") if param.startswith(("prompt.messages[", "prompt.tools")) else param
        param = param.replace(_TEMPLATE_ARGUMENTS, "chat_template_kwargs", 1)
    message = f"{param} is {_shown(error.value)}; it must be {error.limit}"
    if not is_too_long(error):
        return HttpError(400, message, code="invalid_value", param=param)
    if max_model_len:
        # LiteLLM matches the sentence, LangChain the code, which it now finds only in the message.
        message = f"This model's maximum context length is {max_model_len} tokens (context_length_exceeded): {message}"
    return HttpError(400, message, code="context_length_exceeded", param=param)


def _shown(value: object) -> str:
    if isinstance(value, str) and type(value) is not str:
        # A router's value, in Python's spelling.
        text = str(value)
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            text = json.dumps(ast.literal_eval(text), ensure_ascii=False)
    else:
        # One more than is shown: a huge text or list costs no more than a small one.
        cut = value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str | list | tuple) else value
        text = json.dumps(cut, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
