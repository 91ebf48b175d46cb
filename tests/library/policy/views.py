from dataclasses import replace

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.kv.layout.layout import KvLayout

MODEL = "tiny"
PREFILL, DECODE = (Phase.PREFILL,), (Phase.DECODE,)
LAYOUT = KvLayout("fingerprint", 2, 16, 2, 32, "float32")
OTHER_LAYOUT = replace(LAYOUT, model_fingerprint="other")


def instance(
    instance_id: str,
    served: tuple[Phase, ...] = PREFILL,
    *,
    model: str = MODEL,
    incarnation: int = 1,
    layout: KvLayout | None = None,
    failure_domain: str = "",
    **load: object,
) -> InstanceStatus:
    """Return an instance's status. served: phases of its record; () for a router. load: fields of its InstanceLoad."""
    role = Role.ENGINE if served else Role.ROUTER
    record = InstanceRecord(
        instance_id, incarnation, role, "h:1", model, layout=layout, phases=served, failure_domain=failure_domain
    )
    return InstanceStatus(record, InstanceLoad(**{"sequence_number": 10, **load}))  # type: ignore[arg-type]


def view_of(*statuses: InstanceStatus) -> ClusterView:
    return ClusterView({status.record.instance_id: status for status in statuses})
