"""One simulated cluster: the processes of a plan, their lives, and what the simulation knows of them."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from kaveri.cluster.store import ViewSource
from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import Phase, Role
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.service_host import ServiceHost
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.policy.replication import ReplicationMode
from kaveri.text.generation_config import SamplingDefaults
from kaveri.text.grammars import Grammars
from kaveri.text.tokenizer import ModelTokenizer
from services.instance.config import PhasesConfig
from services.instance.service import instance_host
from services.predictor.config import PredictorConfig
from services.predictor.service import predictor_host
from services.router.config import RouterConfig
from services.router.service import Router, router_host
from tests.simulation.cluster.draws import DrawRecord
from tests.simulation.cluster.engine import SimulatedEngine
from tests.simulation.cluster.entropy import DrawnIds
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_network import NetworkWire
from tests.simulation.cluster.loop import SimulatedLoop, SimulatedProcess, process_of
from tests.simulation.cluster.network import Network
from tests.simulation.cluster.outcomes import RequestOutcome
from tests.simulation.cluster.plan import ROUTER_DEFAULTS, Plan, PlannedInstance
from tests.simulation.cluster.predictor import SimulatedPredictor, SimulatedWorker
from tests.simulation.cluster.replicas import SimulatedReplicas
from tests.simulation.cluster.store import SimulatedStore, SimulatedStoreServer
from tests.simulation.cluster.tokenizer import make_grammars
from tests.simulation.cluster.trace import Trace

MODEL_NAME = "simulated"
PROBER = "prober"
"""The client that asks once the faults have ended. No fault touches it."""
_START_AGAIN_S = 0.2
_STUCK_AFTER_S = 1.0


@dataclasses.dataclass(eq=False, slots=True)
class Life:
    """One life of one instance."""

    planned: PlannedInstance
    process: SimulatedProcess
    stopping: asyncio.Event
    host_name: str
    """Of its address: the instance that had the address first."""
    port: int
    engine: SimulatedEngine | None = None
    host: EngineHost | None = None
    router: Router | None = None
    replicas: SimulatedReplicas | None = None
    """The copies that it holds."""
    serving: ServiceHost | EngineHost | None = None
    """What hosts the one or the other."""
    ended: bool = False
    """It was killed, or its main function has returned."""

    @property
    def name(self) -> str:
        """Of the instance."""
        return self.planned.name

    @property
    def address(self) -> str:
        """Where others call it."""
        return f"{self.host_name}:{self.port}"


class World:
    """The cluster. Everything is called on the simulated loop."""

    def __init__(
        self,
        plan: Plan,
        loop: SimulatedLoop,
        network: Network,
        trace: Trace,
        tokenizer: ModelTokenizer,
        rng: random.Random,
        drawn_ids: DrawnIds,
    ) -> None:
        self.plan = plan
        self.drawn_ids = drawn_ids
        self.loop = loop
        self.network = network
        self.trace = trace
        self.tokenizer = tokenizer
        self.rng = rng
        self.model = FakeModel(
            vocab_size=tokenizer.vocab_size,
            layer_count=1,
            max_model_len=plan.max_model_len,
            eos_probability=plan.eos_probability,
        )
        self.draws = DrawRecord(lambda: loop.now)
        self.store = SimulatedStoreServer(network)
        self.lives: dict[str, Life] = {}
        """The newest life of each name."""
        self.former: list[Life] = []
        """Lives that have ended."""
        self.clients: dict[str, SimulatedProcess] = {name: SimulatedProcess(name) for name in (*plan.clients, PROBER)}
        self.client_of = {request.request_id: request.client for request in plan.requests}
        self.outcomes: list[RequestOutcome] = []
        self.violations: list[str] = []
        """What was found while it ran; checks add theirs at the end."""
        self.usual_tasks: dict[str, int] = {}
        """Tasks of each instance before the load began."""
        self.ready_s = 0.0
        """When the load began."""
        self.healed_s = 0.0
        """When the faults ended."""
        self.supervised = False
        """Whether instances that end are started again."""
        self.expected_errors = False
        """Whether a fault makes services log errors."""

    @property
    def engines(self) -> list[SimulatedEngine]:
        """All that ever lived."""
        lives = (*self.former, *self.lives.values())
        return [life.engine for life in lives if life.engine is not None]

    def new_grammars(self) -> Grammars:
        """Compiled grammars of one engine. Where there are no chats tokens are bytes to grammars, as seeds below those
        with chats were found with."""
        backend = self.tokenizer.backend if self.plan.has_chats else None
        return make_grammars(backend, self.model.vocab_size)

    def now(self) -> float:
        """The simulation's time."""
        return self.loop.now

    def task_counts(self) -> dict[str, int]:
        """How many tasks each instance has."""
        counts: Counter[SimulatedProcess] = Counter(process_of(task) for task in asyncio.all_tasks(self.loop))
        return {name: counts[life.process] for name, life in self.lives.items()}

    def is_gone(self, task: asyncio.Task[None]) -> bool:
        """Whether the process that the task belongs to is dead."""
        return process_of(task).dead

    def process_of(self, name: str) -> SimulatedProcess:
        """The process that has the name now."""
        if name in self.lives:
            return self.lives[name].process
        return self.clients.get(name, self.store.process)

    def start(self, name: str, at: str = "") -> Life:
        """Begins a new life of an instance. at: the instance whose last address it gets; empty: as it is drawn."""
        planned = next(instance for instance in self.plan.instances if instance.name == name)
        former = self.lives.get(name)
        number, host_name, port = 1, name, 0
        if former is not None:
            assert former.ended, f"{name} lives"
            self.former.append(former)
            number = former.process.life + 1
            # Half of them come back at their former address. Clients know routers by their addresses.
            if self.rng.random() < 0.5 or planned.role is Role.ROUTER:
                host_name, port = former.host_name, former.port
        if at:
            host_name, port = self.lives[at].host_name, self.lives[at].port
        port = port or self.network.new_port()
        life = Life(planned, SimulatedProcess(name, number), asyncio.Event(), host_name, port)
        self.lives[name] = life
        self.trace.note("life", f"begins {life.process}")
        mains = {Role.ROUTER: self._router, Role.PREDICTOR: self._predictor, Role.ENGINE: self._instance}
        self.loop.spawn(life.process, self._main(life, mains[planned.role](life)))
        return life

    def kill(self, name: str) -> None:
        """Ends a life at once."""
        life = self.lives[name]
        if not life.ended:
            self.trace.note("life", f"killed {life.process}")
            life.ended = True
            self.network.end_process(life.process)

    async def _main(self, life: Life, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except ConfigError as error:
            # It began while the store was out of reach: its supervisor starts it again.
            self.trace.note("life", f"failed {life.process} {error!r}")
        except Exception as error:
            self.trace.note("life", f"failed {life.process} {error!r}")
            if not self.expected_errors:
                self.violations.append(f"{life.process} failed: {error!r}")
        self.trace.note("life", f"ended {life.process}")
        life.ended = True
        # Not from within: the process is marked dead, and this is its own task.
        self.loop.schedule(self.loop.world, 0.0, self._ended, life)

    def _ended(self, life: Life) -> None:
        self.network.end_process(life.process)
        deadly_epochs = {run.epoch for run in self.draws.deadly_runs}
        if self.supervised or (life.engine is not None and life.engine.info.epoch in deadly_epochs):
            self.loop.schedule(self.loop.world, _START_AGAIN_S, self.start_again, life.name)

    def start_again(self, name: str, at: str = "") -> None:
        """As start(), unless it lives."""
        if self.lives[name].ended:
            self.start(name, at)

    def life_of(self, process: SimulatedProcess) -> Life | None:
        """The life that runs, or ran, in a process."""
        return next((life for life in (*self.lives.values(), *self.former) if life.process is process), None)

    def _common(self, life: Life) -> dict[str, Any]:
        """Settings that every service has."""
        plan = self.plan
        return {
            "instance_id": life.name,
            "host": life.host_name,
            "port": life.port,
            "model": MODEL_NAME,
            "drain_timeout_s": plan.drain_timeout_s,
            "lease_ttl_s": plan.lease_ttl_s,
            "heartbeat_interval_s": plan.heartbeat_interval_s,
        }

    async def _router(self, life: Life) -> None:
        plan, flips = self.plan, dict[str, Any]()
        if plan.flip_targets is not None:
            flips = dict(zip(("slo_ttft_s", "slo_tpot_s", "flip_cooldown_s"), plan.flip_targets, strict=True))
        config = RouterConfig(
            **self._common(life),
            max_requests=plan.max_requests,
            placement_policy=plan.placement_policy,
            **flips,
        )

        async with SimulatedStore(self.store) as store:
            defaults = SamplingDefaults(ROUTER_DEFAULTS.get(life.name, SamplingParams()))
            life.router = Router(config, store, self.tokenizer, defaults, _take_grammar)
            life.serving = router_host(life.router)
            await life.serving.serve(life.stopping)

    async def _predictor(self, life: Life) -> None:
        plan = self.plan
        config = PredictorConfig(**self._common(life))
        model = SimulatedPredictor(MODEL_NAME, self.tokenizer.vocab_size, plan.max_model_len)
        async with SimulatedStore(self.store) as store:
            life.serving = predictor_host(config, model, SimulatedWorker(), store, CollectorRegistry())
            await life.serving.serve(life.stopping)

    async def _instance(self, life: Life) -> None:
        plan, planned, phases = self.plan, life.planned, life.planned.phases
        domain = plan.names.index(life.name) % plan.failure_domains
        config = PhasesConfig(
            **self._common(life),
            phases=phases,
            engine="fake",
            chunk_tokens=planned.chunk_tokens,
            max_batch=planned.max_batch,
            orphan_grace_s=plan.orphan_grace_s,
            stuck_after_s=_STUCK_AFTER_S,
            failure_domain=f"domain-{domain}" if plan.failure_domains > 1 else "",
            max_queue=plan.max_queue,
            prefill_policy=plan.prefill_policy,
            prediction=plan.prediction,
            decode_placement=plan.decode_placement,
            decode_policy=plan.decode_policy,
            reservation_ttl_s=plan.reservation_ttl_s,
            replication=plan.replication,
            replica_place=plan.replica_place,
            replica_min_tokens=plan.replica_min_tokens,
        )
        async with SimulatedStore(self.store, ViewSource.BROADCASTS) as store:
            engine = life.engine = SimulatedEngine(
                self.model,
                wire=NetworkWire(self.network),
                rng=random.Random(self.rng.getrandbits(64)),
                block_count=planned.block_count,
                chunk_tokens=planned.chunk_tokens,
                max_batch=planned.max_batch,
                step_s=planned.step_s,
                divergent=plan.divergent,
                draws=self.draws,
                grammars=self.new_grammars(),
            )
            registry, rng = CollectorRegistry(), random.Random(self.rng.getrandbits(64))
            holds_copies = Phase.DECODE in phases or plan.prefills_hold_copies
            if plan.replication is not ReplicationMode.OFF and holds_copies:
                life.replicas = self._replicas(engine)
            life.serving = life.host = instance_host(
                config, engine, store, rng, registry, life.replicas, self.tokenizer
            )
            await life.host.serve(life.stopping)

    def _replicas(self, engine: SimulatedEngine) -> SimulatedReplicas:
        if self.plan.replica_place == "pool":
            return engine.keep_replicas((), 0)
        wire, rng = NetworkWire(self.network), random.Random(self.rng.getrandbits(64))
        memory, allocator = KvMemory(self.model, self.plan.replica_blocks), BlockAllocator(self.plan.replica_blocks)
        return SimulatedReplicas(self.model, engine.info.layout, memory, allocator, wire, rng, self.draws)


async def _take_grammar(grammar: Grammar, deadline_s: float) -> None:
    """Takes every grammar, where routers ask a process of their own."""
