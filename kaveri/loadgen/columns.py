"""Converts the records of a run to the columns that kaveri.workload summarizes."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from kaveri.loadgen.driver import LoadRun
from kaveri.workload.run_columns import SERVER_LOSSES, SERVER_PHASES, Floats, RunColumns, Whole


def columns_of(run: LoadRun) -> RunColumns:
    records = run.records
    error_names = tuple(dict.fromkeys(record.error for record in records if record.error is not None))
    codes = {name: code for code, name in enumerate(error_names, 1)}
    servers = [record.server for record in records]
    prefill_ids = [server.prefill_instance_id if server is not None else "" for server in servers]
    decode_ids = [server.decode_instance_id if server is not None else "" for server in servers]
    instance_ids = tuple(dict.fromkeys(filter(None, (*prefill_ids, *decode_ids))))
    numbers = {instance_id: number for number, instance_id in enumerate(instance_ids)} | {"": -1}
    return RunColumns(
        due_s=_floats(record.due_s for record in records),
        sent_s=_floats(record.sent_s for record in records),
        first_s=_floats(math.nan if record.first_s is None else record.first_s for record in records),
        last_s=_floats(math.nan if record.last_s is None else record.last_s for record in records),
        prompt_tokens=_whole([record.lengths.prompt_tokens for record in records]),
        planned_tokens=_whole([record.planned.lengths.output_tokens for record in records]),
        received_tokens=_whole([record.received_tokens for record in records]),
        error=_whole([0 if record.error is None else codes[record.error] for record in records]),
        error_names=error_names,
        server={
            phase: _floats(math.nan if server is None else getattr(server, phase) for server in servers)
            for phase in SERVER_PHASES
        },
        losses={
            name: _floats(math.nan if server is None else float(getattr(server, name)) for server in servers)
            for name in SERVER_LOSSES
        },
        prefill_instance=_whole([numbers[instance_id] for instance_id in prefill_ids]),
        decode_instance=_whole([numbers[instance_id] for instance_id in decode_ids]),
        instance_ids=instance_ids,
        duration_s=run.duration_s,
        gaps_s=_floats(gap_s for record in records if record.error is None for gap_s in record.gaps_s),
        loop_delays_s=_floats(run.loop_delays_s),
    )


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def _whole(values: Sequence[int]) -> Whole:
    return np.array(values, dtype=np.int64)
