from collections.abc import Callable
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2

from kaveri.v1 import prefill_pb2, sampling_pb2
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.engine_door import EngineDoor, asks


def _sent(name: str, value: Any) -> Callable[[prefill_pb2.SubmitRequest], bool]:
    def is_so(request: prefill_pb2.SubmitRequest) -> bool:
        got = getattr(request.params, name)
        return bool(list(got) == value if isinstance(value, list) else got == pytest.approx(value))

    return is_so


def _asked_for(**grammar: str) -> Callable[[prefill_pb2.SubmitRequest], bool]:
    return lambda request: request.params.grammar == sampling_pb2.Grammar(**grammar)


HONOURED_PARAMS: dict[str, tuple[Any, Callable[[prefill_pb2.SubmitRequest], bool]]] = {
    "temperature": (0.25, _sent("temperature", 0.25)),
    "top_p": (0.5, _sent("top_p", 0.5)),
    "top_k": (7, _sent("top_k", 7)),
    "max_tokens": (9, _sent("max_tokens", 9)),
    "min_tokens": (3, _sent("min_tokens", 3)),
    "stop_token_ids": ([11, 12], _sent("stop_token_ids", [11, 12])),
    "ignore_eos": (True, _sent("ignore_eos", True)),
    "logprobs": (3, _sent("logprobs", 3)),
    "seed": (77, _sent("seed", 77)),
    "min_p": (0.25, _sent("min_p", 0.25)),
    "presence_penalty": (0.5, _sent("presence_penalty", 0.5)),
    "frequency_penalty": (-0.5, _sent("frequency_penalty", -0.5)),
    "repetition_penalty": (1.5, _sent("repetition_penalty", 1.5)),
    "logit_bias": ({5: 1.0}, _sent("logit_bias", {5: 1.0})),
    "json_schema": ('{"type": "null"}', _asked_for(json_schema='{"type": "null"}')),
    "regex": ("a+", _asked_for(regex="a+")),
    "grammar": ('start: "a"', _asked_for(lark='start: "a"')),
    "json_object": (True, _asked_for(json_schema='{"type": "object"}')),
    "choice": (vllm_engine_pb2.ChoiceConstraint(choices=["a"]), _asked_for(choices='["a"]')),
}
HONOURED_ELSEWHERE = {"n", "stop", "skip_special_tokens"}
"""Covered by tests of their own."""
WITHOUT_TEXT = {"spaces_between_special_tokens": True, "include_stop_str_in_output": True}
"""Affect text only, which these answers lack."""
REFUSED_PARAMS: dict[str, list[Any]] = {
    "prompt_logprobs": [0, -1],
    "truncate_prompt_tokens": [0, -1],
    "grammar_from_first_token": [True],
    "structural_tag": ["a"],
}
REFUSED_FIELDS: dict[str, Any] = {
    "kv_transfer_params": vllm_engine_pb2.KvTransferParams(remote_host="a"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": vllm_engine_pb2.MultimodalInputs(),
    "extra_mm_inputs": [vllm_engine_pb2.MultimodalInputs()],
    "data_parallel_rank": 1,
    "media_refs": vllm_engine_pb2.MediaRefs(),
}


def test_every_field_is_either_honoured_or_refused() -> None:
    tried = {*HONOURED_PARAMS, *HONOURED_ELSEWHERE, *WITHOUT_TEXT, *REFUSED_PARAMS}
    assert tried == set(vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    used = {"request_id", "tokenized", "text", "sampling_params", "stream"}
    assert used | set(REFUSED_FIELDS) == set(vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", sorted(HONOURED_PARAMS))
async def test_an_honoured_field_reaches_the_engine(cluster: ScriptedCluster, door: EngineDoor, name: str) -> None:
    value, has_come = HONOURED_PARAMS[name]
    await door.ask(asks(temperature=0.5, max_tokens=4))
    await door.ask(asks(**{"temperature": 0.5, "max_tokens": 4, name: value}))
    by_default, changed = sorted(cluster.taken(), key=has_come)
    assert has_come(changed)
    assert not has_come(by_default)


async def test_what_only_concerns_text_changes_no_token(door: EngineDoor) -> None:
    (plain,) = await door.ask(asks())
    assert await door.ask(asks(**WITHOUT_TEXT)) == [plain]


async def test_values_that_change_nothing_are_taken(door: EngineDoor) -> None:
    request = asks(repetition_penalty=1.0, min_tokens=0, min_p=0.0)
    request.data_parallel_rank = 0
    request.kv_transfer_params_json = ""
    request.tokenized.original_text = "for reference"
    assert await door.ask(request) == await door.ask(asks())


async def test_what_is_not_built_is_refused_by_name(cluster: ScriptedCluster, door: EngineDoor) -> None:
    for name, values in REFUSED_PARAMS.items():
        for value in values:
            assert (await door.refusal(asks(**{name: value}))).field == f"sampling_params.{name}"
    for name, value in (("min_p", float("nan")), ("repetition_penalty", -1.0), ("logit_bias", {5: 101.0})):
        assert (await door.refusal(asks(**{name: value}))).field == f"sampling_params.{name}"
    for name, value in REFUSED_FIELDS.items():
        request = asks()
        request.MergeFrom(vllm_engine_pb2.GenerateRequest(**{name: value}))
        assert (await door.refusal(request)).field == name
    assert not cluster.taken()


@pytest.mark.parametrize("path", ["", "sampling_params.", "tokenized."])
async def test_a_field_of_a_newer_package_is_refused_by_number(door: EngineDoor, path: str) -> None:
    request = asks()
    inner = getattr(request, path.rstrip(".")) if path else request
    inner.MergeFromString(b"\xc0\x3e\x01")
    assert (await door.refusal(request)).field == f"{path}field 1000"


async def test_a_value_beyond_its_limit_is_refused_by_the_fields_name(door: EngineDoor) -> None:
    beyond: dict[str, Any] = {
        "max_tokens": 9_000,
        "min_tokens": 21,
        "logprobs": 21,
        "stop_token_ids": [2**32 - 1],
        "n": 129,
    }
    for name, value in beyond.items():
        assert (await door.refusal(asks(**{name: value}))).field == f"sampling_params.{name}"
    many = asks(stop=["x"] * 17, skip_special_tokens=True)
    assert (await door.refusal(many)).field == "sampling_params.stop"


async def test_a_bad_prompt_or_id_is_refused_by_the_fields_name(door: EngineDoor) -> None:
    request = asks()
    del request.tokenized.input_ids[:]
    assert (await door.refusal(request)).field == "tokenized.input_ids"
    request.tokenized.input_ids.extend([1] * 9_000)
    assert (await door.refusal(request)).field == "tokenized.input_ids"
    request.text = "long " * 9_000
    assert (await door.refusal(request)).field == "text"
    request.ClearField("input")
    assert (await door.refusal(request)).field == "input"
    assert (await door.refusal(asks(request_id="x" * 129))).field == "request_id"
    assert (await door.refusal(asks(request_id="x" * 127, n=2))).field == "request_id"
