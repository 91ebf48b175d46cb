"""Draws a plan from a seed: its own set of faults, rates and sizes each time (swarm testing)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import DrainWay, Phase, Role
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.policy.prediction import PredictionMode
from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.chats import with_chat
from tests.simulation.cluster.network import LinkQuality
from tests.simulation.cluster.plan import INSTANCE_KINDS, Fault, FaultKind, Plan, PlannedInstance, ScheduledRequest
from tests.simulation.cluster.store import STORE_NAME
from tests.simulation.cluster.tokenizer import STOP_TEXTS, make_tokenizer

BLOCK_TOKENS = 16
_FIRST_WITH_FLIPS = 1_000_000
"""Tests name seeds below, which keep their plans."""
_FIRST_WITH_CHATS = 10_000_000
_FIRST_WITH_LOSSES = 1000
_TOKENIZER = make_tokenizer()
VOCAB_SIZE = len(_TOKENIZER)
LAST_TOKEN_ID = int(_TOKENIZER.convert_tokens_to_ids("a"))
"""Prompts end with a whole character, so that the text of an answer does not depend on its prompt."""
_DRAWN_ELSEWHERE = (
    FaultKind.SWITCH,
    FaultKind.FLIP,
    FaultKind.UNDRAIN,
    FaultKind.STUCK,
    FaultKind.DAMAGE,
    FaultKind.DEATH,
)
"""By _with_switches, _with_flips, _with_undrains, _with_rare_faults and _with_deaths."""
_WORDS = ("the", "hot", "band", "steps", "on", "a", "sand", "bed", "née", "漢", "😀", "habe", "not")


def draw_plan(seed: int, *, faults: bool = True) -> Plan:
    """The plan of a seed. faults: False leaves them out, and all else as it is."""
    rng = random.Random(f"plan {seed}")
    instances = _instances(rng)
    clients = tuple(f"client-{number}" for number in range(rng.randint(1, 3)))
    load_s = rng.uniform(1.8, 3.5)
    routers = tuple(instance.name for instance in instances if instance.role is Role.ROUTER)
    max_model_len = _max_model_len(instances)
    requests = tuple(
        sorted(
            (
                _request(rng, f"r{number}", clients, routers, load_s, max_model_len)
                for number in range(rng.randint(20, 30))
            ),
            key=lambda request: request.at_s,
        )
    )
    drawn = _with_undrains(seed, _faults(rng, instances, clients, load_s), instances, load_s)
    lease_ttl_s = rng.choice((0.6, 1.0, 1.0, 2.0))
    plan = Plan(
        seed=seed,
        instances=instances,
        clients=clients,
        requests=requests,
        faults=drawn if faults else (),
        link=LinkQuality(rng.choice((0.0001, 0.0005, 0.002)), rng.choice((0.0002, 0.001, 0.005))),
        max_model_len=max_model_len,
        eos_probability=rng.choice((0.0, 0.0, 0.02)),
        divergent=rng.random() < 0.3,
        lease_ttl_s=lease_ttl_s,
        # The services' own default is a tenth; most of a schedule's work would be heartbeats.
        heartbeat_interval_s=lease_ttl_s / 5,
        reservation_ttl_s=rng.choice((2.0, 5.0)),
        drain_timeout_s=rng.choice((0.5, 2.0)),
        max_queue=rng.choice((256, 256, 256, 4)),
        placement_policy=rng.choice(tuple(PlacementPolicy)),
        decode_placement=rng.choice(tuple(DecodePlacementPolicy)),
        decode_policy=rng.choice((AdmissionPolicy.GREEDY, *AdmissionPolicy)),
        prefill_policy=rng.choice(tuple(OrderingPolicy)),
        **_replication(seed),
    )
    # Seeds below stand in the table of planted bugs, and keep their plans.
    if seed < _FIRST_WITH_LOSSES:
        return plan
    if faults:
        plan = _with_switches(plan, random.Random(f"switches {seed}"), load_s)
    if plan.replication is not ReplicationMode.OFF:
        plan = _with_losses(plan, random.Random(f"losses {seed}"), faults=faults)
    plan = _with_predictor(plan, random.Random(f"predictor {seed}"), load_s, faults=faults)
    plan = _with_direct_clients(plan, random.Random(f"direct {seed}"))
    if seed >= _FIRST_WITH_CHATS:
        plan = _with_chats(plan, random.Random(f"chats {seed}"))
    if not faults:
        return plan
    plan = _with_former_lives(plan, random.Random(f"former lives {seed}"))
    if seed >= _FIRST_WITH_FLIPS:
        plan = _with_flips(plan, random.Random(f"flips {seed}"), load_s)
        plan = _with_flip_policy(plan, random.Random(f"flip policy {seed}"))
        plan = replace(plan, prefills_hold_copies=random.Random(f"prefills hold {seed}").random() < 0.7)
    return _with_deaths(_with_rare_faults(plan, random.Random(f"rare {seed}")), random.Random(f"deaths {seed}"))


def _replication(seed: int) -> dict[str, Any]:
    # From a generator of its own, so that everything else of a plan stays as it was before there were copies.
    rng = random.Random(f"replication {seed}")
    if rng.random() < 0.5:
        return {}
    mode = rng.choice((ReplicationMode.PAIR, ReplicationMode.RING, *(ReplicationMode.SPREAD,) * 4))
    place_rng = random.Random(f"replica place {seed}")
    in_pool, in_pairs = place_rng.random() < 0.4, place_rng.random() < 0.5
    return {
        "replication": ReplicationMode.PAIR if in_pool and in_pairs else mode,
        # Some are so small that holders drop copies.
        "replica_blocks": rng.choice((12, 40, 200, 200)),
        "replica_min_tokens": rng.choice((1, 16, 32, 64)),
        "failure_domains": rng.choice((1, 2)),
        "replica_place": "pool" if in_pool else "host",
    }


def _with_losses(plan: Plan, rng: random.Random, *, faults: bool) -> Plan:
    """The plan with enough instances to hold copies, answers that are long enough to have some, and a lost owner."""
    owners = [instance for instance in plan.instances if instance.phases == (Phase.DECODE,)]
    added = tuple(replace(owners[0], name=f"decode-{number}") for number in range(len(owners), 3) if owners)
    instances = (*plan.instances, *added)
    plan = _with_long_answers(plan, rng)
    names = [instance.name for instance in instances if Phase.DECODE in instance.phases]
    lost = Fault(
        kind=rng.choice((FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.ISOLATE, FaultKind.ENGINE)),
        at_s=rng.uniform(0.5, 3.0),
        target=rng.choice(names),
        lasts_s=rng.choice((0.3, 1.0, 3.0)),
    )
    all_faults = plan.faults
    if faults and rng.random() < 0.7:
        all_faults = tuple(sorted((*all_faults, lost), key=lambda fault: fault.at_s))
    return replace(plan, instances=instances, faults=all_faults)


def _with_predictor(plan: Plan, rng: random.Random, load_s: float, *, faults: bool) -> Plan:
    """The plan with a length predictor that something happens to, in some."""
    if rng.random() < 0.7:
        return plan
    role, phases = INSTANCE_KINDS["predictor"]
    predictor = PlannedInstance(name="predictor-0", role=role, phases=phases)
    mode = rng.choice((PredictionMode.PARALLEL, PredictionMode.SEQUENTIAL))
    kind = rng.choice((FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.ISOLATE, FaultKind.DRAIN))
    lasts_s = 0.0 if kind is FaultKind.KILL else rng.choice((0.3, 1.0, 3.0))
    hit = Fault(kind=kind, at_s=rng.uniform(0.0, load_s), target=predictor.name, lasts_s=lasts_s)
    all_faults = (*plan.faults, hit) if faults and rng.random() < 0.7 else plan.faults
    ordered = tuple(sorted(all_faults, key=lambda fault: fault.at_s))
    return replace(plan, instances=(*plan.instances, predictor), prediction=mode, faults=ordered)


def _with_direct_clients(plan: Plan, rng: random.Random) -> Plan:
    """The plan with clients that read answers at decode instances, in half of all."""
    if rng.random() < 0.5:
        return plan
    return replace(plan, direct_clients=tuple(name for name in plan.clients if rng.random() < 0.7))


def _with_chats(plan: Plan, rng: random.Random) -> Plan:
    """The plan with conversations, tools and reasoning in place of some prompts, in a third of all."""
    if rng.random() < 0.67:
        return plan
    share = rng.choice((0.2, 0.5))
    requests = (with_chat(request, rng) if rng.random() < share else request for request in plan.requests)
    return replace(plan, requests=tuple(requests))


def _with_rare_faults(plan: Plan, rng: random.Random) -> Plan:
    """The plan with faults that hit two processes at once, an engine alone, or a block of KV: in a third of all."""
    if rng.random() < 0.67:
        return plan
    routers = [instance.name for instance in plan.routers]
    decodes = [instance.name for instance in plan.serving(Phase.DECODE)]
    engines = [instance.name for instance in plan.instances if instance.phases]
    at_s, lasts_s = rng.uniform(0.5, 3.0), rng.choice((0.3, 1.0, 3.0))
    match rng.choice(("pair", "pair", "stuck", "damage", "link")):
        case "pair":
            pair = (rng.choice(decodes), rng.choice((*decodes, *decodes, *routers, *plan.clients)))
            added = [
                _of_a_pair(rng, target, plan, at_s + rng.choice((0.0, 0.1, 0.7)), lasts_s)
                for target in dict.fromkeys(pair)
            ]
        case "stuck":
            added = [Fault(kind=FaultKind.STUCK, at_s=at_s, target=rng.choice(engines), lasts_s=lasts_s)]
        case "damage":
            added = [
                Fault(
                    kind=FaultKind.DAMAGE,
                    at_s=rng.uniform(0.0, 3.0),
                    target=source,
                    other=rng.choice(decodes),
                    lasts_s=1.0,
                )
                for source in engines
            ]
        case _:
            kind = rng.choice((FaultKind.CUT, FaultKind.RESET))
            others = [name for name in (*decodes, *routers) if name != decodes[0]] or [routers[0]]
            lasts_s = 0.0 if kind is FaultKind.RESET else lasts_s
            added = [Fault(kind=kind, at_s=at_s, target=decodes[0], other=rng.choice(others), lasts_s=lasts_s)]
    return replace(plan, faults=tuple(sorted((*plan.faults, *added), key=lambda fault: fault.at_s)))


def _with_deaths(plan: Plan, rng: random.Random) -> Plan:
    """The plan with requests that raise an exception wherever they are computed, in a quarter of all; in half of those
    nothing else happens."""
    if rng.random() < 0.75:
        return plan
    deaths = [
        Fault(
            kind=FaultKind.DEATH,
            at_s=0.0,
            target=request.request_id,
            other=rng.choice(("forward", "forward", "draw")),
            amount=float(rng.choice((0, rng.randrange(request.params.max_tokens or 1)))),
        )
        for request in rng.sample(plan.requests, rng.choice((1, 2, 5)))
    ]
    return replace(plan, faults=(*deaths, *(plan.faults if rng.random() < 0.5 else ())))


def _with_former_lives(plan: Plan, rng: random.Random) -> Plan:
    """The plan with an engine whose new life begins soon at an address that is known as another life's, in a quarter.

    Routers learn of it late, because the store does not reach them; their streams, and their clients', break meanwhile,
    so that they ask at that address; what prefill and the former life report comes late.
    """
    if rng.random() < 0.75:
        return plan
    decodes = [instance.name for instance in plan.serving(Phase.DECODE)]
    engines = [instance.name for instance in plan.instances if instance.phases]
    routers = [instance.name for instance in plan.routers]
    target = rng.choice(decodes)
    at_s, away_s, stale_s = rng.uniform(0.3, 2.0), rng.choice((0.02, 0.1, 0.4)), rng.choice((1.0, 3.0))
    address_of = target if rng.random() < 0.6 else rng.choice(engines)
    back_s = at_s + away_s + 0.3
    added = [Fault(kind=FaultKind.RESTART, at_s=at_s, target=target, other=address_of, lasts_s=away_s)]
    for router in routers:
        if rng.random() < 0.8:
            lasts_s = away_s + 0.5 + stale_s
            kind = FaultKind.CUT_ONE_WAY
            added.append(Fault(kind=kind, at_s=at_s - 0.05, target=STORE_NAME, other=router, lasts_s=lasts_s))
        others = [rng.choice((*plan.clients, *plan.clients, target)) for _ in range(rng.choice((1, 2, 4)))]
        added += [
            Fault(kind=FaultKind.RESET, at_s=back_s + rng.uniform(-0.3, stale_s), target=other, other=router)
            for other in others
        ]
    if rng.random() < 0.6:
        # Routers then do not wait for the store before they look for a request.
        added.append(Fault(kind=FaultKind.STORE_AWAY, at_s=back_s, lasts_s=stale_s))
    if rng.random() < 0.5:
        added += _late_and_repeated(rng, plan, rng.choice(routers))
    return _with_long_answers(
        replace(plan, faults=tuple(sorted((*plan.faults, *added), key=lambda fault: fault.at_s))), rng
    )


def _late_and_repeated(rng: random.Random, plan: Plan, router: str) -> Iterator[Fault]:
    """A token stream that breaks again and again, a router that asks there late, and reports of placements that are
    later still: tokens come before it is known whose they are, and once more after it was."""
    decode = rng.choice(plan.serving(Phase.DECODE)).name
    ways = [(router, decode), *((instance.name, router) for instance in plan.serving(Phase.PREFILL))]
    for source, target in ways:
        amount = rng.choice((0.02, 0.05, 0.2))
        yield Fault(kind=FaultKind.SLOW, at_s=0.0, target=source, other=target, lasts_s=3.0, amount=amount)
    for _ in range(rng.choice((2, 6))):
        yield Fault(kind=FaultKind.RESET, at_s=rng.uniform(0.0, 2.5), target=decode, other=router)


def _with_long_answers(plan: Plan, rng: random.Random) -> Plan:
    most_tokens = plan.max_model_len // 2
    requests = tuple(
        replace(request, params=_as_long(request.params, rng.randint(most_tokens // 2, most_tokens)))
        if request.prompt and not request.read_pause_s and rng.random() < 0.4
        else request
        for request in plan.requests
    )
    return replace(plan, requests=requests)


def _of_a_pair(rng: random.Random, target: str, plan: Plan, at_s: float, lasts_s: float) -> Fault:
    if target in plan.clients:
        return Fault(kind=FaultKind.CLIENT, at_s=at_s, target=target)
    kind = rng.choice((FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.ISOLATE))
    return Fault(kind=kind, at_s=at_s, target=target, lasts_s=0.0 if kind is FaultKind.KILL else lasts_s)


def draw_prompt(rng: random.Random, token_count: int) -> tuple[int, ...]:
    """Token ids of a prompt."""
    return (*(1 + rng.randrange(VOCAB_SIZE - 1) for _ in range(token_count - 1)), LAST_TOKEN_ID)


def _instances(rng: random.Random) -> tuple[PlannedInstance, ...]:
    colocated = rng.choice((0, 0, 0, 1))
    only_colocated = rng.random() < 0.08
    counts = {
        "router": rng.choice((1, 1, 2, 2, 3)),
        "prefill": 0 if only_colocated else rng.randint(1, 3),
        "decode": 0 if only_colocated else rng.randint(1, 3),
        "colocated": rng.randint(1, 2) if only_colocated else colocated,
    }
    # Pools in which a few requests fill everything, in some schedules.
    most_blocks = rng.choice((24, 40, 200, 200))
    step_s = rng.choice((0.005, 0.01, 0.02))
    return tuple(
        PlannedInstance(
            name=f"{kind}-{number}",
            role=role,
            phases=phases,
            block_count=rng.randint(20, most_blocks),
            step_s=step_s * rng.uniform(0.7, 1.4),
            chunk_tokens=rng.choice((32, 64, 128)),
            max_batch=rng.choice((2, 8, 16)),
        )
        for kind, count in counts.items()
        for role, phases in [INSTANCE_KINDS[kind]]
        for number in range(count)
    )


def _max_model_len(instances: tuple[PlannedInstance, ...]) -> int:
    # A request of the model's whole length must fit into the smallest pool.
    smallest = min(instance.block_count for instance in instances if instance.role is not Role.ROUTER)
    return BLOCK_TOKENS * min(smallest, 20)


def _request(
    rng: random.Random,
    request_id: str,
    clients: tuple[str, ...],
    routers: tuple[str, ...],
    load_s: float,
    max_model_len: int,
) -> ScheduledRequest:
    prompt_tokens = min(rng.choice((4, 20, 60, 150)) + rng.randrange(30), max_model_len // 2)
    is_text = rng.random() < 0.15
    drawn_tokens = 1 + int(rng.expovariate(1 / rng.choice((8, 16, 16, 80))))
    most_tokens = max(1, min(drawn_tokens, max_model_len - 150 if is_text else max_model_len // 2))
    # Not rng, which the schedules of earlier seeds go on with.
    own = random.Random(f"{request_id} {most_tokens}")
    params = SamplingParams(
        max_tokens=most_tokens,
        min_tokens=own.randrange(most_tokens + 1) if own.random() < 0.2 else 0,
        temperature=rng.choice((0.0, 0.0, 1.0)),
        seed=rng.choice((None, rng.getrandbits(32))),
        ignore_eos=rng.random() < 0.5,
        stop=tuple(rng.sample(STOP_TEXTS, 2)) if rng.random() < 0.15 else (),
        stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.1 else (),
        logprobs=rng.choice((0, 2)) if rng.random() < 0.1 else None,
        prompt_logprobs=own.choice((0, 2)) if own.random() < 0.2 else None,
    )
    if own.random() < 0.2:
        params = replace(params, temperature=None)
    short = rng.random() < 0.04
    request = ScheduledRequest(
        request_id=request_id,
        client=rng.choice(clients),
        router=rng.choice(routers),
        at_s=rng.uniform(0.0, load_s),
        prompt=() if is_text else draw_prompt(rng, prompt_tokens),
        text=" ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 12))) if is_text else "",
        params=params,
        timeout_s=rng.uniform(0.05, 1.5) if short else 120.0,
        cancel_after_s=rng.expovariate(1 / 0.15) if rng.random() < 0.12 else None,
        cancels_by_id=rng.random() < 0.5,
        read_pause_s=min(rng.choice((0.02, 0.2)), 10.0 / most_tokens) if rng.random() < 0.06 else 0.0,
        sends_again=tuple(rng.choice(routers) for _ in range(rng.randint(1, 3))) if rng.random() < 0.35 else (),
    )
    request = replace(request, draws_id=not request.sends_again and own.random() < 0.6)
    return replace(request, params=replace(params, **_rules(own))) if own.random() < 0.2 else request


def _rules(rng: random.Random) -> dict[str, Any]:
    token_ids = rng.sample(range(VOCAB_SIZE), 24)
    return rng.choice(
        (
            {"repetition_penalty": 1.7, "allowed_token_ids": token_ids},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5, "allowed_token_ids": token_ids},
            {"logit_bias": dict.fromkeys(token_ids, 5.0), "frequency_penalty": 1.0},
            # Of bytes, which the simulated engines' tokens are to grammars.
            {"grammar": Grammar.regex("([!-%][&-*]){3,20}"), "ignore_eos": False, "min_tokens": 0},
        )
    )


def _as_long(params: SamplingParams, most_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=most_tokens, min_tokens=min(params.min_tokens, most_tokens))


def _faults(
    rng: random.Random, instances: tuple[PlannedInstance, ...], clients: tuple[str, ...], load_s: float
) -> tuple[Fault, ...]:
    kinds = [kind for kind in FaultKind if kind not in _DRAWN_ELSEWHERE and rng.random() < 0.4]
    if not kinds or rng.random() < 0.08:
        return ()
    targets = _Targets(rng, instances, clients)
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6, 10))):
        # Several faults hit at once, or one while another one is being dealt with.
        together = faults and rng.random() < 0.4
        at_s = faults[-1].at_s + rng.choice((0.0, rng.expovariate(20.0))) if together else rng.uniform(0.0, load_s)
        fault = _fault(rng, rng.choice(kinds), min(at_s, load_s), load_s, targets)
        faults.append(fault)
        if fault.kind is FaultKind.RESET:
            faults += [
                replace(fault, at_s=min(load_s, fault.at_s + rng.uniform(0.0, 0.5)))
                for _ in range(rng.choice((0, 2, 8)))
            ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _with_undrains(
    seed: int, faults: tuple[Fault, ...], instances: tuple[PlannedInstance, ...], load_s: float
) -> tuple[Fault, ...]:
    """Adds drains that are taken back. Drawn apart: the rest of each seed's plan stays what it was before they were."""
    rng = random.Random(f"undrains {seed}")
    if rng.random() < 0.7:
        return faults
    undrains = [
        Fault(
            kind=FaultKind.UNDRAIN,
            at_s=rng.uniform(0.0, load_s),
            target=rng.choice(instances).name,
            lasts_s=rng.choice((0.05, 0.5, 2.0)),
        )
        for _ in range(rng.choice((1, 1, 2, 4)))
    ]
    return tuple(sorted((*faults, *undrains), key=lambda fault: fault.at_s))


def _with_switches(plan: Plan, rng: random.Random, load_s: float) -> Plan:
    """The plan with instances that serve another phase for a while, in some; each phase may be left without any."""
    return plan if rng.random() < 0.7 else _with_orders(FaultKind.SWITCH, plan, rng, load_s)


def _with_flips(plan: Plan, rng: random.Random, load_s: float) -> Plan:
    """The plan with orders of an operator, in some. An order that leaves a phase without an instance is refused."""
    if rng.random() < 0.6:
        return plan
    plan = _with_orders(FaultKind.FLIP, plan, rng, load_s)
    ways = (*DrainWay, DrainWay.MIGRATE, DrainWay.MIGRATE)
    flips = [replace(fault, drain=rng.choice(ways)) if fault.kind is FaultKind.FLIP else fault for fault in plan.faults]
    return replace(plan, faults=tuple(flips))


def _with_flip_policy(plan: Plan, rng: random.Random) -> Plan:
    """The plan with phases that change by targets which its steps miss now and then, in some."""
    if rng.random() < 0.6:
        return plan
    step_s = max(instance.step_s for instance in plan.instances)
    ttft_s, tpot_s = rng.choice((0.02, 0.1, 0.5)), step_s * rng.choice((0.8, 1.1, 1.5))
    return replace(plan, flip_targets=(ttft_s, tpot_s, rng.choice((0.2, 0.5, 1.0))))


def _with_orders(kind: FaultKind, plan: Plan, rng: random.Random, load_s: float) -> Plan:
    orders = [
        Fault(
            kind=kind,
            at_s=rng.uniform(0.0, load_s),
            target=rng.choice([instance.name for instance in plan.instances if instance.phases]),
            other=rng.choice(tuple(Phase)),
            lasts_s=rng.choice((0.05, 0.5, 2.0)),
        )
        for _ in range(rng.choice((1, 2, 4)))
    ]
    return replace(plan, faults=tuple(sorted((*plan.faults, *orders), key=lambda fault: fault.at_s)))


class _Targets:
    """Chooses what a fault hits. In some schedules a few processes have most of the bad luck."""

    def __init__(self, rng: random.Random, instances: tuple[PlannedInstance, ...], clients: tuple[str, ...]) -> None:
        self._rng = rng
        self._kinds = {instance.name: (instance.role, instance.phases) for instance in instances}
        self.names = tuple(self._kinds)
        self.engines = tuple(name for name, (_, phases) in self._kinds.items() if phases)
        self.clients = clients
        unlucky = rng.sample(self.names, min(3, len(self.names)))
        self._unlucky = unlucky if rng.random() < 0.5 else ()

    def one_of(self, names: tuple[str, ...]) -> str:
        """A process."""
        unlucky = [name for name in self._unlucky if name in names]
        return self._rng.choice(unlucky if unlucky and self._rng.random() < 0.7 else names)

    def pair(self) -> tuple[str, str]:
        """Two processes, mostly two that talk to each other a lot."""
        target = self.one_of(self.names)
        if self._rng.random() < 0.3:
            return target, self.one_of(
                tuple(each for each in (*self.names, *self.clients, STORE_NAME) if each != target)
            )
        talking = tuple(name for name, kind in self._kinds.items() if kind != self._kinds[target])
        return target, self.one_of(talking)


def _fault(rng: random.Random, kind: FaultKind, at_s: float, load_s: float, targets: _Targets) -> Fault:
    target, other = targets.one_of(targets.names), ""
    lasts_s = rng.choice((0.05, 0.3, 0.8, 1.5, 3.0)) * rng.uniform(0.5, 1.5)
    amount = 0.0
    match kind:
        case FaultKind.KILL:
            lasts_s = 0.0
        case FaultKind.FREEZE:
            target = targets.one_of((*targets.names, *targets.names, *targets.clients, STORE_NAME))
        case FaultKind.CUT | FaultKind.CUT_ONE_WAY:
            target, other = targets.pair()
            # Now and then for longer than a connection lives.
            lasts_s = 17.0 if rng.random() < 0.1 else lasts_s
        case FaultKind.SLOW:
            target, other = targets.pair()
            amount = rng.choice((0.02, 0.1, 0.4, 1.0))
            if rng.random() < 0.5:
                at_s, lasts_s = 0.0, load_s
        case FaultKind.RESET:
            target, other = targets.pair()
            lasts_s = 0.0
        case FaultKind.CLOCK:
            target, lasts_s = targets.one_of((*targets.names, STORE_NAME)), 0.0
            amount = rng.choice((0.3, 2.0, 20.0)) * (rng.choice((-1, 1)) if target == STORE_NAME else 1)
        case FaultKind.STORE_AWAY | FaultKind.STORE_LOST | FaultKind.STORE_REFUSES:
            target = ""
        case FaultKind.STORE_EMPTIED:
            target, lasts_s = "", 0.0
        case FaultKind.ENGINE:
            target = targets.one_of(targets.engines)
        case FaultKind.CLIENT:
            target, lasts_s = rng.choice(targets.clients), 0.0
    return Fault(kind=kind, at_s=at_s, target=target, other=other, lasts_s=lasts_s, amount=amount)
