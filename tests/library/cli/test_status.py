import io
import re

from rich.console import Console

from kaveri.cli.status import _as_table
from kaveri.domain.view import (
    WIRE,
    ClusterView,
    InstanceLoad,
    InstanceRecord,
    InstanceStatus,
    Phase,
    ReplicaCounts,
    Role,
)


def shown(*loads: InstanceLoad) -> str:
    statuses = {
        f"decode-{number}": InstanceStatus(
            InstanceRecord(f"decode-{number}", 1, Role.ENGINE, "h:1", "m", phases=(Phase.DECODE,)), load
        )
        for number, load in enumerate(loads)
    }
    text = io.StringIO()
    Console(width=240, file=text).print(_as_table(ClusterView(statuses), "h:1"))
    return text.getvalue()


def test_memory_for_copies_is_shown_where_an_instance_holds_some() -> None:
    holding = InstanceLoad(replica_free_bytes=100 << 20, replica_total_bytes=256 << 20)
    text = shown(holding, InstanceLoad())
    assert "copies free/total MiB" in text
    assert "100/256" in text
    assert "copies" not in shown(InstanceLoad())


def test_how_replication_does_is_shown_where_an_instance_says_it() -> None:
    counts = ReplicaCounts(owned=12, unprotected=3, lag_tokens=17, resumed=5, moved=8)
    says = InstanceLoad(replica_free_bytes=0, replica_total_bytes=256 << 20, replica_counts=counts)
    # An instance of a former version holds copies but reports no counts.
    silent = InstanceLoad(replica_free_bytes=0, replica_total_bytes=256 << 20)
    titles, first, second = (
        [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]
        for line in shown(says, silent).splitlines()
        if re.search("[┃│]", line)
    )
    cells = dict(zip(titles, first, strict=True))
    assert (cells["requests copied"], cells["lag tokens"], cells["resumed"], cells["moved"]) == (
        "12/15",
        "17",
        "5",
        "8",
    )
    without = dict(zip(titles, second, strict=True))
    assert {without[title] for title in ("requests copied", "lag tokens", "resumed", "moved")} == {""}
    assert not {"requests copied", "lag tokens", "resumed", "moved"} & set(shown(InstanceLoad()).split())


def test_an_instance_of_another_wire_number_is_shown_as_ignored() -> None:
    record = InstanceRecord("decode-9", 1, Role.ENGINE, "h:1", "m", version="9.0", wire=WIRE + 1)
    view = ClusterView(incompatible={"decode-9": InstanceStatus(record, InstanceLoad())})
    text = io.StringIO()
    Console(width=240, file=text).print(_as_table(view, "h:1"))
    assert "ignored: version 9.0" in text.getvalue()
