"""What `kaveri status` shows of instances."""

import io

from rich.console import Console

from kaveri.cli.status import _as_table
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role


def shown(*loads: InstanceLoad) -> str:
    statuses = {
        f"decode-{number}": InstanceStatus(
            InstanceRecord(f"decode-{number}", 1, Role.ENGINE, "h:1", "m", phases=(Phase.DECODE,)), load
        )
        for number, load in enumerate(loads)
    }
    text = io.StringIO()
    Console(width=200, file=text).print(_as_table(ClusterView(statuses), "h:1"))
    return text.getvalue()


def test_memory_for_copies_is_shown_where_an_instance_holds_some() -> None:
    holding = InstanceLoad(replica_free_bytes=100 << 20, replica_total_bytes=256 << 20)
    text = shown(holding, InstanceLoad())
    assert "copies free/total MiB" in text
    assert "100/256" in text
    assert "copies" not in shown(InstanceLoad())
