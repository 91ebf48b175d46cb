"""Plans written by hand: one cluster, one story. Each shows a bug that once was, or one kind of fault."""

import random
from collections.abc import Sequence

from kaveri.domain.sampling import SamplingParams
from tests.simulation.cluster.draw import draw_prompt
from tests.simulation.cluster.plan import INSTANCE_KINDS, Fault, Plan, PlannedInstance, ScheduledRequest

CLIENT = "client-0"


def cluster(
    *, routers: int = 1, prefills: int = 1, decodes: int = 1, colocated: int = 0, predictors: int = 0, **same: float
) -> tuple[PlannedInstance, ...]:
    """Instances named "prefill-0" and so on. same: fields that all engines share, as of PlannedInstance."""
    counts = {
        "router": routers,
        "prefill": prefills,
        "decode": decodes,
        "colocated": colocated,
        "predictor": predictors,
    }
    return tuple(
        PlannedInstance(name=f"{kind}-{number}", role=role, phases=phases, **same)  # type: ignore[arg-type]
        for kind, (role, phases) in INSTANCE_KINDS.items()
        for number in range(counts[kind])
    )


def request(
    request_id: str,
    at_s: float = 0.0,
    *,
    prompt_tokens: int = 20,
    max_tokens: int = 10,
    router: str = "router-0",
    sends_again: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> ScheduledRequest:
    """A greedy request of exactly `max_tokens` tokens."""
    return ScheduledRequest(
        request_id=request_id,
        client=CLIENT,
        router=router,
        at_s=at_s,
        prompt=draw_prompt(random.Random(request_id), prompt_tokens),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        timeout_s=timeout_s,
        sends_again=tuple(sends_again),
    )


def story(
    instances: tuple[PlannedInstance, ...],
    requests: Sequence[ScheduledRequest],
    faults: Sequence[Fault],
    seed: int = 0,
    **settings: object,
) -> Plan:
    """A plan of one client. settings: other fields of Plan."""
    return Plan(
        seed=seed,
        instances=instances,
        clients=(CLIENT,),
        requests=tuple(requests),
        faults=tuple(faults),
        **settings,  # type: ignore[arg-type]
    )
