"""Handles /tokenize and /detokenize: validates the JSON body, and asks a router."""

from collections.abc import Mapping
from typing import Any

from kaveri.client.async_client import AsyncClient
from kaveri.errors import InvalidArgument
from services.gateway.fields import Fields, one_of
from services.gateway.parsed_request import read_messages
from services.gateway.tools import take_chat_options


async def tokenize(client: AsyncClient, body: Mapping[str, Any]) -> dict[str, object]:
    """Return the JSON response to /tokenize: the token ids of a text or a conversation. Raises KaveriError."""
    fields = Fields(body)
    model, prompt, messages = fields.text("model"), fields.text("prompt"), fields.take("messages")
    chat = None if messages is None else take_chat_options(fields)
    fields.refuse_rest(
        {
            "add_generation_prompt": one_of(True),
            "add_special_tokens": one_of(messages is None),
            "return_token_strs": one_of(False),
        }
    )
    if (prompt is None) == (messages is None):
        raise InvalidArgument("prompt", prompt, "given, or else messages")
    turns = None if messages is None else read_messages(messages)
    token_ids = (await client.render(prompt, messages=turns, chat=chat, model=model)).token_ids
    lengths = [one.max_model_len for one in await client.list_models() if model in (None, one.name)]
    return {"count": len(token_ids), "max_model_len": min(lengths, default=0), "tokens": token_ids, "token_strs": None}


async def detokenize(client: AsyncClient, body: Mapping[str, Any]) -> dict[str, object]:
    """Return the JSON response to /detokenize: the text of token ids. Raises KaveriError."""
    fields = Fields(body)
    model, tokens = fields.text("model"), fields.take("tokens")
    fields.refuse_rest({})
    if not isinstance(tokens, list) or set(map(type, tokens)) - {int}:
        raise InvalidArgument("tokens", tokens, "a list of token ids")
    try:
        return {"prompt": await client.detokenize(tokens, model=model)}
    except InvalidArgument as error:
        # Use the caller's name of the field.
        field = "tokens" if error.field in ("token_ids", "prompt_token_ids") else error.field
        raise InvalidArgument(field, error.value, error.limit) from error
