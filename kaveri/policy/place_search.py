"""Decides when to search for a computed prompt's decode instance. Pure: no clock, no I/O."""

import enum


class PlaceSearch(enum.Enum):
    """Start of the search. A first token that ends the answer precedes any search."""

    AT_START = enum.auto()
    """At the first chunk, as soon as the prediction has arrived or is known to be late."""
    AFTER_FIRST_CHUNK = enum.auto()
    AFTER_FIRST_TOKEN = enum.auto()


def place_search(token_count: int, chunk_tokens: int, draws_more: bool, at_first_token: bool) -> PlaceSearch:
    """token_count: tokens to compute. draws_more: True if decode would have a token to sample.

    at_first_token: True if an earlier search gains nothing, because nothing is pushed.
    """
    if at_first_token or not draws_more:
        return PlaceSearch.AFTER_FIRST_TOKEN
    # A prompt of one chunk has no second chunk to overlap the push with. With its place found during its computation,
    # the push can begin with the first layer instead of after the last.
    return PlaceSearch.AT_START if token_count <= chunk_tokens else PlaceSearch.AFTER_FIRST_CHUNK


def draws_more(token_count: int, generated_count: int, max_tokens: int, max_model_len: int) -> bool:
    """Return True if a token may follow the next one.

    token_count: the prompt and the `generated_count` answer tokens that exist. max_tokens: of the whole answer.
    """
    return generated_count + 1 < max_tokens and token_count + 1 < max_model_len
