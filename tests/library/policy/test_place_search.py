from hypothesis import example, given
from hypothesis import strategies as st

from kaveri.policy.room_search import PlaceSearch, draws_more, place_search


@given(st.integers(1, 100), st.integers(1, 100), st.booleans(), st.booleans())
def test_a_place_is_sought_early_only_where_a_push_can_use_it(
    token_count: int, chunk_tokens: int, more: bool, at_first_token: bool
) -> None:
    search = place_search(token_count, chunk_tokens, more, at_first_token)
    if at_first_token or not more:
        assert search is PlaceSearch.AFTER_FIRST_TOKEN
    else:
        assert (search is PlaceSearch.AT_START) == (token_count <= chunk_tokens)
        assert search is not PlaceSearch.AFTER_FIRST_TOKEN


@example(prompt_tokens=10, generated_count=2, max_tokens=60, max_model_len=13)
@example(prompt_tokens=10, generated_count=2, max_tokens=3, max_model_len=60)
@given(st.integers(1, 30), st.integers(0, 29), st.integers(1, 60), st.integers(2, 60))
def test_more_is_drawn_if_the_answer_and_the_model_both_have_room_for_a_second_token(
    prompt_tokens: int, generated_count: int, max_tokens: int, max_model_len: int
) -> None:
    room = min(max_tokens - generated_count, max_model_len - prompt_tokens - generated_count)
    assert draws_more(prompt_tokens + generated_count, generated_count, max_tokens, max_model_len) == (room >= 2)
