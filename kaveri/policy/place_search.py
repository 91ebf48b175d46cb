"""When a computed prompt's place at decode is looked for. Pure: no clock, no I/O."""

import enum


class PlaceSearch(enum.Enum):
    """When the search begins. A first token that ends the answer comes before any search."""

    AT_START = enum.auto()
    """With the first chunk, as soon as it is known whether a prediction comes in time."""
    AFTER_FIRST_CHUNK = enum.auto()
    AFTER_FIRST_TOKEN = enum.auto()


def place_search(token_count: int, chunk_tokens: int, draws_more: bool, at_first_token: bool) -> PlaceSearch:
    """token_count: tokens to compute. draws_more: whether decode would have a token to draw.

    at_first_token: whether there is nothing to gain before the first token, because nothing is pushed.
    """
    if at_first_token or not draws_more:
        return PlaceSearch.AFTER_FIRST_TOKEN
    # A prompt of one chunk has no second one to push beside. With its place found while it is computed, the push can
    # begin with the first layer and not after the last.
    return PlaceSearch.AT_START if token_count <= chunk_tokens else PlaceSearch.AFTER_FIRST_CHUNK


def draws_more(token_count: int, generated_count: int, max_tokens: int, max_model_len: int) -> bool:
    """Whether a token may follow the next one.

    token_count: the prompt and the `generated_count` tokens of the answer that exist. max_tokens: of the whole answer.
    """
    return generated_count + 1 < max_tokens and token_count + 1 < max_model_len
