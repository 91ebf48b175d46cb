"""kaveri plan pipeline: one pipeline, several, or one for each phase (DéjàVu)."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kaveri.cli.options import option
from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths, Workload

if TYPE_CHECKING:
    from kaveri.planner.pipeline_plan import PipelinePlan, Scheme

_ALL = 1 << 31


def pipeline(
    profile: Annotated[str, option("Latency of a machine that holds the whole model: bundled, or a file.")],
    model: Annotated[str, option("Bundled model, or a TOML file with the same fields.")] = "",
    hardware: Annotated[str, option("Bundled kind of GPU, or a TOML file.")] = "a100-80g",
    gpus_per_machine: Annotated[int, option("Of one stage; they share its layers.")] = 2,
    machines: Annotated[int, option("Machines to use.")] = 8,
    trace: Annotated[Path | None, option("Draw lengths from a trace.")] = None,
    lengths: Annotated[str, option("Or these: PROMPT,ANSWER tokens, in turn.")] = "",
    requests: Annotated[int, option("Most requests to simulate; fewer where the interval is narrow.", min=1)] = 1 << 16,
    streaming: Annotated[float, option("How much longer prompts take while their KV is sent out.")] = 1.05,
    microbatch: Annotated[int | None, option("Requests in a microbatch; unset: 2 to 32 are tried.")] = None,
    as_json: Annotated[bool, option("Print all that was found as JSON.", "--json")] = False,
) -> None:
    """Divide machines between prompts and tokens, so that they answer the most requests per second.

    DéjàVu's equations 1 to 7, and the steady rates of its three schemes: one pipeline, several, and one for each phase.
    """
    from kaveri.latency.model import load_latency_model
    from kaveri.planner.catalog import read_hardware, read_model_shape
    from kaveri.planner.pipeline_plan import MICROBATCH_SIZES, PipelineQuestion, plan_pipelines
    from kaveri.planner.profiles import model_of

    shape = read_model_shape(model or model_of([profile]))
    seen, _ = read_lengths(trace, lengths, shape.max_model_len)
    question = PipelineQuestion(
        model=shape,
        hardware=read_hardware(hardware),
        latency=load_latency_model(profile),
        gpus_per_machine=gpus_per_machine,
        machines=machines,
        requests=seen,
        streaming=streaming,
        most_requests=requests,
        microbatch_sizes=MICROBATCH_SIZES if microbatch is None else (microbatch,),
    )
    found = plan_pipelines(question)
    if as_json:
        print(json.dumps(_to_json(found)))
    else:
        _show(found)


def _to_json(found: "PipelinePlan") -> dict[str, object]:
    return {
        "schemes": [asdict(scheme) for scheme in found.schemes],
        "is_certain": found.is_certain,
        "microbatch": found.microbatch,
        "prompt_machines": found.prompt_machines,
        "least_prompt_depth": found.least_prompt_depth,
        "least_token_depth": found.least_token_depth,
        "apart_pays": found.apart_pays,
    }


def _show(found: "PipelinePlan") -> None:
    from rich.console import Console
    from rich.table import Table

    from kaveri.planner.pipeline_plan import streaming_bound

    console = Console(highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    names = ("scheme", "machines", "microbatch", "requests/s", "95 % interval", "simulated", "USD")
    for name in names:
        table.add_column(name, justify="left" if name == "scheme" else "right")
    question = found.question
    machine_price = question.gpus_per_machine * question.hardware.price_per_hour
    for scheme in found.schemes:
        rates = f"{scheme.requests_per_s:.3f}", f"{1 / scheme.high_s:.3f} to {1 / scheme.low_s:.3f}"
        cost = scheme.machine_hours * machine_price
        cells = (_machines(scheme), str(scheme.microbatch), *rates, str(scheme.request_count), f"{cost:.2f}")
        table.add_row(scheme.name, *cells)
    console.print(table)
    console.print()
    best = found.best.name
    console.print(f"{best} is the fastest" if found.is_certain else f"{best} may be the fastest; intervals overlap")
    machines = question.machines
    console.print(f"with microbatches of {found.microbatch}:")
    console.print(f"equation 7: {found.prompt_machines:.2f} of {machines} machines for prompts")
    least = f"{found.least_prompt_depth} for prompts, {found.least_token_depth} for tokens"
    console.print(f"equations 2 and 3: at least {least}")
    if found.apart_pays is None:
        bound = streaming_bound(machines)
        console.print(f"equation 5 says nothing: --streaming {question.streaming:g} is not below 2 - 1/D = {bound:.4g}")
    else:
        verdict = "pay" if found.apart_pays else "do not pay"
        console.print(f"equation 5: two pipelines {verdict}, if machines could be shared without rounding")
    console.print("machines: of one pipeline; pipelines x machines; of prompts + of tokens")
    console.print("USD are for 1,000 requests; rates are those while requests never run out")
    console.print("rates are estimates: stages are equal, and links take no time but --streaming")


def _machines(scheme: "Scheme") -> str:
    if scheme.prompt_depth:
        return f"{scheme.prompt_depth} + {scheme.depth}"
    return str(scheme.depth) if scheme.pipelines == 1 else f"{scheme.pipelines} x {scheme.depth}"


def read_lengths(trace: Path | None, lengths: str, longest: int) -> tuple[list[RequestLengths], int]:
    """Read lengths from a trace, or parse `lengths`. Also returns how many of the trace exceed `longest` tokens."""
    from kaveri.planner.expected_load import parse_lengths

    if (trace is None) == (not lengths):
        raise ConfigError("--trace", "or --lengths must be given, and not both; or --from-cluster")
    if trace is None:
        return parse_lengths(lengths), 0
    fitting, too_long = read_fitting(trace, longest)
    return list(fitting.lengths), too_long


def read_fitting(trace: Path, longest: int) -> tuple[Workload, int]:
    """Read a trace's requests of at most `longest` tokens, in order of arrival; also returns the number left out."""
    from kaveri.workload.traces import read_trace

    load = read_trace(trace, _ALL)
    fitting = load.fitting(longest)
    if not fitting.lengths:
        raise ConfigError("--trace", f"no request fits into {longest} tokens")
    return fitting, len(load.lengths) - len(fitting.lengths)
