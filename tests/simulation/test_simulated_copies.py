"""The simulator against the real services in virtual time: an instance with copies elsewhere is killed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.policy.replication import ReplicationMode
from kaveri.simulator.failures import Death, FailureSpec
from kaveri.simulator.simulate import Simulation
from kaveri.simulator.spec import ClusterSpec, CopySpec, DecodeSpec, PoolSpec, PrefillSpec, RouterSpec
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.workload.requests import PlannedRequest, RequestLengths
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind
from tests.simulation.cluster.schedule import run_schedule
from tests.support.conservation import check_conservation

BLOCK_TOKENS = 16
POOL_BLOCKS = 2000
"""So many that no request moves to level the batches."""
STEP_S = 0.02
PROMPT_TOKENS, ANSWER_TOKENS = 100, 150
ARRIVALS_S = tuple(1.0 + 0.15 * number for number in range(9))
"""From when the instances are paired."""
DIES_S = 3.5
"""All have decoded for a second at least, and none has ended."""


@dataclass(frozen=True)
class GoneOn:
    """How the requests of the killed instance went on."""

    holders: frozenset[str]
    """Where they were resumed."""
    resumed: int
    most_recomputed: int
    """Tokens, of one request."""
    prompts: int
    """That were computed, of all requests."""


def of_services(mode: ReplicationMode, killed: str, tokenizer: ModelTokenizer) -> GoneOn:
    requests = [
        request(f"r{number}", at_s, prompt_tokens=PROMPT_TOKENS, max_tokens=ANSWER_TOKENS)
        for number, at_s in enumerate(ARRIVALS_S)
    ]
    plan = story(
        cluster(prefills=1, decodes=3, step_s=STEP_S, block_count=POOL_BLOCKS),
        requests,
        [Fault(kind=FaultKind.KILL, at_s=DIES_S, target=killed)],
        max_model_len=320,
        replication=mode,
        replica_min_tokens=32,
        divergent=True,
    )
    result = run_schedule(plan, tokenizer, lines=True)
    assert result.violations == []
    found = [line for line in result.lines if "request_resumed " in line]
    assert all(f"owner_id={killed}" in line for line in found)
    called = [line for line in result.lines if "start      /kaveri.v1.PrefillService/Submit " in line]
    # The rest are of the cluster's checks at the end.
    called = [line for line in called if re.search(r'request_id: "r\d"', line)]
    return GoneOn(
        frozenset(line.split()[1].partition("/")[0].partition("#")[0] for line in found),
        len(found),
        max(_numbers(found, "recomputed_tokens"), default=0),
        len(called),
    )


def of_simulator(mode: ReplicationMode, killed: str) -> GoneOn:
    latency = LatencyModel(
        name="even steps",
        source="test",
        prefill=PrefillLatency(step_s=STEP_S, token_s=0.0, token_squared_s=0.0),
        decode=(DecodeLatency(min_batch=1, step_s=STEP_S, context_token_s=0.0, request_s=0.0),),
    )
    pool = PoolSpec(latency=latency, total_blocks=POOL_BLOCKS, chunk_tokens=64, max_batch=16, max_model_len=320)
    copies = CopySpec(replication=mode, replica_blocks=200, replica_min_tokens=32, orphan_grace_s=2.0)
    spec = ClusterSpec(
        prefill_count=1,
        decode_count=3,
        prefill=PrefillSpec(engine=pool),
        decode=DecodeSpec(engine=pool, copies=copies),
        failures=FailureSpec(deaths=(Death(instance_id=killed, at_s=DIES_S),), repair_s=None),
        router=RouterSpec(lengths_known=False),
    )
    lengths = RequestLengths(PROMPT_TOKENS, ANSWER_TOKENS)
    simulation = Simulation(spec, [PlannedRequest(number, at_s, lengths) for number, at_s in enumerate(ARRIVALS_S)])
    run = simulation.run().columns()
    check_conservation(simulation)
    resumed = run.server["resumes"] > 0
    attempts = sum(simulation.table.attempts)
    return GoneOn(
        frozenset(run.placements.instance_ids[index] for index in run.placements.decode[resumed]),
        int(resumed.sum()),
        int(run.server["recomputed_tokens"].max()),
        attempts - int(run.server["resumes"].sum()),
    )


def _numbers(lines: Sequence[str], name: str) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.search(rf" {name}=(\d+)", line))]


@pytest.mark.parametrize(
    ("mode", "killed"),
    [(ReplicationMode.PAIR, "decode-0"), (ReplicationMode.PAIR, "decode-1"), (ReplicationMode.RING, "decode-1")],
)
def test_requests_of_a_killed_instance_go_on_where_and_as_the_simulator_says(
    mode: ReplicationMode, killed: str, tokenizer: ModelTokenizer
) -> None:
    real, simulated = of_services(mode, killed, tokenizer), of_simulator(mode, killed)
    assert real.holders == simulated.holders
    assert len(real.holders) == 1
    assert min(real.resumed, simulated.resumed) >= 1
    for one in (real, simulated):
        assert one.most_recomputed <= 2 * BLOCK_TOKENS
        assert one.prompts == len(ARRIVALS_S), "no prompt is computed again"
