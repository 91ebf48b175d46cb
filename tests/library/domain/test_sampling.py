"""SamplingParams: accepted and refused values, and conversion to messages and back."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.sampling import ResolvedParams, SamplingParams
from kaveri.errors import InvalidArgument
from kaveri.v1 import sampling_pb2
from kaveri.wire.messages import params_from_proto, params_to_proto, shown_params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 2**32),
        ("min_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("川" * 86,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", tuple(range(65))),
        ("stop_token_ids", (-1,)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", True),
        ("logit_bias", {5: 101}),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {5: True}),
        ("logit_bias", ((5,),)),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * 65),
        ("bad_words", ("x" * 257,)),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", tuple(range(2**14 + 1))),
        ("allowed_token_ids", {5}),
    ],
)
def test_a_value_over_its_limit_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == f"params.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("top_p", 1e-6),
        ("top_k", 0),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("stop", ("x" * 256,) * 16),
        ("stop_token_ids", tuple(range(64))),
        ("logprobs", 0),
        ("logprobs", 20),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("logit_bias", tuple((token_id, -100.0) for token_id in range(1024))),
        ("bad_words", ("x" * 256,) * 64),
        ("allowed_token_ids", tuple(range(2**14))),
    ],
)
def test_a_value_at_its_limit_is_taken(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_an_answer_cannot_be_longer_at_least_than_at_most() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidArgument, match=r"min_tokens is 6; .*\[0, 5\]"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_one_stop_text_and_lists_become_tuples() -> None:
    one: Any = "\n\n"
    assert SamplingParams(stop=one).stop == ("\n\n",)
    several: Any = ["a", "b"]
    assert SamplingParams(stop=several).stop == ("a", "b")
    bias: Any = {7: 1, 5: -0.5}
    assert SamplingParams(logit_bias=bias).logit_bias == ((5, -0.5), (7, 1.0))
    ids: Any = [1, 2]
    assert hash(SamplingParams(stop_token_ids=ids)) == hash(SamplingParams(stop_token_ids=(1, 2)))


def test_an_unset_message_means_nothing_chosen_for_routers_and_neutral_values_for_instances() -> None:
    empty = sampling_pb2.SamplingParams()
    assert params_from_proto(empty, SamplingParams) == SamplingParams()
    assert params_from_proto(empty, ResolvedParams) == ResolvedParams(temperature=1.0, top_p=1.0, top_k=0)


def test_rules_of_a_request_come_through_the_wire() -> None:
    given = ResolvedParams(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 0.5), (7, -100.0)),
        bad_words=("a", "b c"),
        allowed_token_ids=(1, 2, 3),
        bad_token_ids=((4,), (5, 6)),
    )
    assert params_from_proto(params_to_proto(given), ResolvedParams) == given
    # Only routers spell words.
    assert params_from_proto(params_to_proto(given), SamplingParams).bad_words == ("a", "b c")


@pytest.mark.parametrize("ids", [((),), ((1,),) * 129, ((1,) * 513,)])
def test_spellings_of_a_router_have_limits(ids: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"params.bad_token_ids"):
        ResolvedParams(bad_token_ids=ids)


def test_ids_beyond_the_vocabulary_are_refused_by_the_name_of_their_parameter() -> None:
    for name, value in (
        ("stop_token_ids", (9,)),
        ("allowed_token_ids", (1, 9)),
        ("logit_bias", ((9, 1.0),)),
        ("bad_token_ids", ((1, 9),)),
    ):
        params = ResolvedParams(**{name: value})  # type: ignore[arg-type]
        params.check_known_ids(10)
        with pytest.raises(InvalidArgument) as caught:
            params.check_known_ids(9)
        assert caught.value.field == f"params.{name}"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_resolved_parameters_lack_nothing_that_a_draw_needs(name: str) -> None:
    unset: Any = {name: None}
    with pytest.raises(InvalidArgument) as caught:
        ResolvedParams(**unset)
    assert caught.value.field == f"params.{name}"


def test_what_is_not_chosen_is_the_defaults_and_all_else_stays() -> None:
    defaults = SamplingParams(max_tokens=9, temperature=0.5, top_k=20, seed=3, stop=("x",), ignore_eos=True)
    assert SamplingParams(seed=7, stop=("a",), logprobs=2).resolved(defaults) == ResolvedParams(
        max_tokens=9, temperature=0.5, top_p=1.0, top_k=20, seed=7, stop=("a",), logprobs=2
    )
    given = SamplingParams(max_tokens=4, temperature=0.0, top_p=1.0, top_k=0, min_p=0.5, repetition_penalty=2.0)
    assert given.resolved(defaults).chosen == given.chosen
    assert SamplingParams().resolved() == ResolvedParams()


def test_a_default_length_below_min_tokens_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"params.min_tokens is 5; .*\[0, 4\]"):
        SamplingParams(min_tokens=5).resolved(SamplingParams(max_tokens=4))


@pytest.mark.parametrize("value", [0.6, 0.7, 0.95, 1.0, 0.0, 1.3])
def test_people_see_the_numbers_of_the_file_and_not_those_of_the_wire(value: float) -> None:
    arrived = params_from_proto(params_to_proto(SamplingParams(temperature=value, top_k=0)), SamplingParams)
    assert shown_params(arrived) == {"temperature": value, "top_k": 0}


def test_the_wire_refuses_what_the_constructor_refuses() -> None:
    with pytest.raises(InvalidArgument, match="top_p"):
        params_from_proto(sampling_pb2.SamplingParams(top_p=2.0), SamplingParams)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        params_from_proto(sampling_pb2.SamplingParams(max_tokens=0), SamplingParams)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 2**32 - 1),
        # 32 bits wide, as on the wire.
        temperature=st.none() | st.floats(0, 100, width=32),
        top_p=st.none() | st.floats(0, 1, width=32, exclude_min=True),
        top_k=st.none() | st.integers(0, 2**32 - 1),
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), max_size=4).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        min_tokens=st.sampled_from([0, 1]),
    )
)
def test_params_survive_the_wire(params: SamplingParams) -> None:
    wire = params_to_proto(params).SerializeToString()
    assert params_from_proto(sampling_pb2.SamplingParams.FromString(wire), SamplingParams) == params
