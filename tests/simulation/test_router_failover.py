"""A router dies, hangs or is cut off from its client in each phase of a request: the answer goes on, computed once."""

import dataclasses

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster.directed import CLIENT, cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind
from tests.simulation.cluster.schedule import run_schedule

_PHASES = {
    "before its prompt is sent": "start /kaveri.v1.InferenceService/Generate",
    "prefilling": "start /kaveri.v1.PrefillService/Submit",
    "pushing": "start /kaveri.v1.DecodeService/Reserve",
    "streaming": "message /kaveri.v1.InferenceService/Generate",
}
_FAULTS = {
    "killed": {"kind": FaultKind.RESTART, "lasts_s": 0.5},
    "frozen": {"kind": FaultKind.FREEZE, "lasts_s": 5.0},
    "drained": {"kind": FaultKind.DRAIN, "lasts_s": 0.5},
    "cut off from its client": {"kind": FaultKind.CUT, "other": CLIENT, "lasts_s": 5.0},
}


@pytest.mark.parametrize("phase", _PHASES)
@pytest.mark.parametrize("fault", _FAULTS)
def test_an_answer_goes_on_through_another_router_and_its_prompt_is_computed_once(
    tokenizer: ModelTokenizer, fault: str, phase: str
) -> None:
    # A request before it: the client has reached its router, and knows that it answers fast.
    requests = [request("before", max_tokens=2), request("moved", 0.5, prompt_tokens=150, max_tokens=40)]
    # While streaming: after some tokens of the second answer.
    count = 12 if phase == "streaming" else 2
    disturbed = Fault(after=_PHASES[phase], after_count=count, at_s=0.001, target="router-0", **_FAULTS[fault])  # type: ignore[arg-type]
    plan = story(cluster(routers=2, prefills=1, decodes=2, step_s=0.03), requests, [disturbed], max_model_len=320)
    result = run_schedule(plan, tokenizer, lines=True)
    assert result.violations == []
    assert any("request_reattached request_id=moved" in line for line in result.lines), "the fault missed the request"
    prompts = [line for line in result.lines if "start      /kaveri.v1.PrefillService/Submit " in line]
    moved = [line for line in prompts if 'request_id: "moved"' in line]
    assert len(moved) == 1, "its prompt was computed again"


def test_an_instance_that_hangs_and_leaves_while_it_is_asked_for_a_request_does_not_hold_it(
    tokenizer: ModelTokenizer,
) -> None:
    plan = story(
        cluster(routers=2, prefills=1, decodes=2, step_s=0.05),
        [request("moved", 0.3, prompt_tokens=200, max_tokens=30)],
        [
            Fault(kind=FaultKind.FREEZE, at_s=0.1, target="decode-1", lasts_s=4.0),
            Fault(
                kind=FaultKind.RESTART,
                after="start /kaveri.v1.PrefillService/Submit",
                at_s=0.02,
                target="router-0",
                lasts_s=0.5,
            ),
        ],
        max_model_len=320,
    )
    assert run_schedule(plan, tokenizer).violations == []


def test_a_request_that_reports_on_its_prompt_begins_again_when_its_router_dies_before_the_first_token(
    tokenizer: ModelTokenizer,
) -> None:
    """Seed 948448 of the simulation: a check took the second computation of the prompt for a fault."""
    dies = Fault(kind=FaultKind.RESTART, at_s=0.9, target="router-0", lasts_s=3.0)
    moved = request("moved", 0.5, prompt_tokens=200, max_tokens=20)
    moved = dataclasses.replace(moved, params=dataclasses.replace(moved.params, prompt_logprobs=2))
    requests = [request("before", max_tokens=2), moved]
    result = run_schedule(
        story(cluster(routers=2, step_s=0.1), requests, [dies], max_model_len=320), tokenizer, lines=True
    )
    assert result.violations == []
    prompts = [line for line in result.lines if "start      /kaveri.v1.PrefillService/Submit " in line]
    assert any("session: 1" in line for line in prompts if 'request_id: "moved"' in line)
