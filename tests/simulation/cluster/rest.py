"""What must be gone when a cluster is at rest: requests, blocks, claims, calls."""

from kaveri.domain.view import Phase
from tests.simulation.cluster.world import Life, World


def leftovers(world: World) -> list[str]:
    """What is still there, as sentences. Empty: the cluster is at rest."""
    found: list[str] = []
    for life in world.lives.values():
        found += [f"{life.process}: {what}" for what in _of_router(life) + _of_instance(life)]
    claimed = _claimed(world)
    if claimed:
        found.append(f"the store: {len(claimed)} requests in its table: {', '.join(claimed[:5])}")
    calls = [call for call in world.network.open_calls if not call.process.dead]
    streams = sum(1 for call in calls if call.path.endswith("/Follow"))
    instances = {instance.name for phase in Phase for instance in world.plan.serving(phase)}
    expected = len(world.plan.routers) * len(instances)
    if streams != expected:
        found.append(f"{streams} streams to routers, not {expected}")
    others = sorted({call.path for call in calls if not call.path.endswith("/Follow")})
    if others:
        found.append(f"calls that have not ended: {', '.join(others)}")
    return found


def extra_tasks(world: World) -> list[str]:
    """Tasks that instances have at rest, beyond those of a new instance of their role."""
    counts = world.task_counts()
    return [
        f"{life.process} has {counts[life.name]} tasks, {world.usual_tasks[life.name]} when it was new"
        for life in world.lives.values()
        if counts[life.name] > world.usual_tasks[life.name]
    ]


def unpaired(world: World) -> list[str]:
    """Instances whose loads, as routers see them, name no partner or not each other; one may be left over."""
    found: list[str] = []
    for life in world.lives.values():
        if life.router is None:
            continue
        able = {
            name: one.load
            for name, one in life.router.store.view().instances.items()
            if one.load.partner_id is not None and one.load.replica_total_bytes
        }
        broken = [
            f"{name} has the partner {load.partner_id!r}, as {life.name} sees it"
            for name, load in able.items()
            if (other := able.get(load.partner_id or "")) is None or other.partner_id != name
        ]
        found += broken if len(broken) > len(able) % 2 else []
    return found


def _claimed(world: World) -> list[str]:
    """Ids that a living router has in the store's table. What a dead one has left there is taken over."""
    cluster = world.store.cluster
    routers = {life.router.router_id for life in world.lives.values() if life.router is not None}
    # By the store's own clock, which may have jumped.
    with world.loop.as_process(world.store.process):
        claims = cluster.requests()
    return [claim.request_id for claim in claims if f"{claim.router_id}.{claim.router_incarnation:016x}" in routers]


def _of_router(life: Life) -> list[str]:
    router = life.router
    if router is None:
        return []
    found = []
    if len(router.table):
        found.append(f"{len(router.table)} requests in the table")
    else:
        try:
            router.placer.check_integrity()
            router.feeds.check_integrity()
        except AssertionError as error:
            found.append(f"something of ended requests is left: {error}")
    return found


def _of_instance(life: Life) -> list[str]:
    if life.serving is None or life.router is not None:
        return []
    found, load = [], life.serving.load()
    if load.waiting_requests or load.running_requests:
        found.append(f"{load.waiting_requests} requests wait and {load.running_requests} run")
    engine = life.engine
    if engine is None:
        return found
    stats = engine.stats()
    if stats.free_blocks != engine.info.total_blocks:
        found.append(f"{engine.info.total_blocks - stats.free_blocks} blocks are not free")
    leased = engine.kv_flow().receiving.leased_block_count
    if leased:
        found.append(f"{leased} blocks are leased to transfers")
    if life.replicas is not None:
        usage = life.replicas.usage()
        if usage.replica_count or usage.used_bytes:
            found.append(f"{usage.replica_count} copies are held, {usage.used_bytes} bytes")
        try:
            life.replicas.check_integrity()
        except AssertionError as error:
            found.append(f"the account of its copies is wrong: {error}")
    try:
        engine.check_integrity()
    except AssertionError as error:
        found.append(f"the engine's account is wrong: {error}")
    return found
