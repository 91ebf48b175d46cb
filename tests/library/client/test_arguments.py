import array
import copy
import decimal
import pickle
from typing import Any

import numpy as np
import pytest

from kaveri import AsyncClient, Client, InvalidArgument, Message, SamplingParams
from kaveri.client.request import MAX_TIMEOUT_S
from tests.library.client.inference_double import InferenceDouble

FIVE = SamplingParams(max_tokens=5)

WRONG_TEXT: list[Any] = [1, b"text", ["text"], object(), True, 1.5, "\ud800"]
WRONG_NAME: list[Any] = [*WRONG_TEXT, "", " ", "\n"]
WRONG_IDS: list[Any] = ["12", b"12", 1, {1: 2}, {1, 2}, [1.0], ["1"], [None], [True], [-1], [2**32], [[1]], object()]
WRONG_MESSAGES: list[Any] = [
    "hi",
    1,
    {"role": "user", "content": "hi"},
    ["hi"],
    [None],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": 1, "content": "hi"}],
    [{"role": "user", "content": [7]}],
    [{"role": "user", "content": None}],
    [Message("user", 1)],  # type: ignore[arg-type]
    [Message(None, "hi")],  # type: ignore[arg-type]
    [{"role": "user", "content": "\ud800"}],
    [("user", "hi")],
]
WRONG_TIMES: list[Any] = ["1", b"1", [1], object(), True, 0, -1, float("nan"), float("inf"), 1e12, MAX_TIMEOUT_S * 1.01]
WRONG_TIMES += [1j, decimal.Decimal(1)]
WRONG_REQUEST_IDS: list[Any] = [*WRONG_NAME, "a" * 129, "é" * 65]

STREAM: dict[str, list[Any]] = {
    "prompt": WRONG_TEXT,
    "prompt_token_ids": WRONG_IDS,
    "messages": WRONG_MESSAGES,
    "params": ["params", 1, {"max_tokens": 5}, object(), True],
    "model": WRONG_NAME,
    "request_id": WRONG_REQUEST_IDS,
    "timeout_s": WRONG_TIMES,
}
PARAMS: dict[str, list[Any]] = {
    "max_tokens": ["1", 1.0, [1], True, 0, -1, 2**32, object()],
    "temperature": ["1", [1], True, -0.1, float("nan"), float("inf"), 1e39, 10**400, 1j, object()],
    "top_p": ["1", [1], True, 0, -1, 1.1, float("nan"), 1e-50, object()],
    "top_k": ["1", 1.0, True, -1, 2**32, object()],
    "seed": ["1", 1.0, True, -1, 2**64, object()],
    "stop": [
        1,
        b"x",
        [1],
        [b"x"],
        None,
        {"x"},
        {"x": 1},
        [None],
        "",
        [""],
        "\ud800",
        ["x" * 257],
        ["x"] * 17,
        object(),
    ],
    "stop_token_ids": [1, "12", b"12", None, {1}, {1: 2}, [1.0], ["1"], [True], [-1], [2**32], [1] * 65, object()],
    "ignore_eos": [1, 0, "yes", None, object()],
    "skip_special_tokens": [1, 0, "yes", None, object()],
    "logprobs": ["1", 1.0, True, -1, 21, object()],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{number}")
        for name, values in table.items()
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), cases(STREAM))
async def test_a_wrong_argument_of_a_request_is_refused_by_name(
    service: InferenceDouble, target: str, name: str, value: Any
) -> None:
    prompts = ("prompt", "prompt_token_ids", "messages")
    arguments: dict[str, Any] = {} if name in prompts else {"prompt": "prompt"}
    async with AsyncClient(target) as client:
        with pytest.raises(InvalidArgument) as caught:
            client.stream(**arguments, **{name: value})
        assert caught.value.field == name
        with pytest.raises(InvalidArgument) as caught:
            await client.generate(**arguments, **{name: value})
        assert caught.value.field == name
    assert not service.requests


@pytest.mark.parametrize(("name", "value"), cases(PARAMS))
def test_a_wrong_sampling_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == f"params.{name}"
    assert caught.value.limit
    again = copy.copy(caught.value)
    assert (again.field, again.limit, str(again)) == (caught.value.field, caught.value.limit, str(caught.value))


def test_a_key_of_public_ports_does_not_go_with_reading_at_decode_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidArgument, match="direct is True; it must be False with api_key: a public port"):
            make("127.0.0.1:1", api_key="key", direct=True)
    # It may be set for a command such as `kaveri drain`.
    monkeypatch.setenv("KAVERI_API_KEY", "key")
    AsyncClient("127.0.0.1:1", direct=True)


@pytest.mark.parametrize("timeout_s", WRONG_TIMES)
async def test_a_wrong_timeout_is_refused_by_every_call(target: str, timeout_s: Any) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidArgument) as caught:
            make(target, timeout_s=timeout_s)
        assert caught.value.field == "timeout_s"
    async with AsyncClient(target) as client:
        for call in (
            client.list_models(timeout_s=timeout_s),
            client.get_model("alphabet", timeout_s=timeout_s),
            client.cancel("some", timeout_s=timeout_s),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.field == "timeout_s"


async def test_a_wrong_name_or_id_is_refused_by_every_call(target: str) -> None:
    async with AsyncClient(target) as client:
        for request_id in WRONG_REQUEST_IDS:
            with pytest.raises(InvalidArgument) as caught:
                await client.cancel(request_id)
            assert caught.value.field == "request_id"
        for name in WRONG_NAME:
            with pytest.raises(InvalidArgument) as caught:
                await client.get_model(name)
            assert caught.value.field == "name"


@pytest.mark.parametrize("timeout_s", [5, np.float32(5), np.int64(5), MAX_TIMEOUT_S])
async def test_right_timeouts_reach_the_server(service: InferenceDouble, target: str, timeout_s: Any) -> None:
    async with AsyncClient(target, timeout_s=timeout_s) as client:
        assert (await client.generate("prompt", params=FIVE)).text == "abcde"
    (deadline_s,) = service.deadlines_s
    assert deadline_s is not None
    # gRPC rounds long times up to hours.
    assert 0.5 * timeout_s < deadline_s <= 1.001 * timeout_s + 1


@pytest.mark.parametrize(
    "token_ids", [[0, 7, 2**32 - 1], (0, 7), range(3), np.array([1, 2]), array.array("I", [3, 4]), iter([5, 6])]
)
async def test_whole_numbers_of_any_sequence_are_token_ids(
    service: InferenceDouble, target: str, token_ids: Any
) -> None:
    kept = list(token_ids)
    given = iter(kept) if iter(token_ids) is token_ids else token_ids
    async with AsyncClient(target) as client:
        await client.generate(prompt_token_ids=given, params=FIVE)
    assert list(service.requests[0].token_ids.ids) == [int(number) for number in kept]


async def test_the_longest_request_id_is_taken(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client:
        completion = await client.generate("prompt", params=FIVE, request_id="é" * 64)
    assert completion.request_id == service.requests[0].request_id == "é" * 64


def test_numbers_of_other_types_become_plain_ones() -> None:
    untyped: dict[str, Any] = {"max_tokens": np.int64(5), "top_k": np.uint8(3), "temperature": np.float32(0.5)}
    untyped |= {"top_p": 1, "seed": np.uint64(7), "logprobs": np.int8(2), "stop_token_ids": np.array([1, 2])}
    params = SamplingParams(**untyped)
    assert params == SamplingParams(
        max_tokens=5, top_k=3, temperature=0.5, top_p=1.0, seed=7, logprobs=2, stop_token_ids=(1, 2)
    )
    assert [type(value) for value in (params.max_tokens, params.top_p, params.temperature)] == [int, float, float]
    assert pickle.loads(pickle.dumps(params)) == params
