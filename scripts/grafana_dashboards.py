"""Writes deploy/grafana/dashboards/*.json: the panels below, with what Grafana wants around them.

Usage: python scripts/grafana_dashboards.py [TARGET_FOLDER]; a test names a temporary one and compares.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_JOB = 'job="$job"'
_PER_ROW = 3
_WIDTH, _HEIGHT = 8, 8


@dataclass(frozen=True)
class Query:
    """One line, or one for each label value: a PromQL expression and Grafana's format of the legend."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A graph over time, or with kind "stat" the newest values. unit: of Grafana's, as `s` or `Bps`. text: shown on
    demand: what is drawn, and what it means when it is large."""

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    stacked: bool = False
    kind: str = "timeseries"


def _select(name: str, labels: str = "") -> str:
    return f"{name}{{{_JOB}{', ' + labels if labels else ''}}}"


def _rate(name: str, labels: str = "") -> str:
    return f"rate({_select(name, labels)}[$__rate_interval])"


def _total(name: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({by}) ({_select(name, labels)})" if by else f"sum({_select(name, labels)})"


def _total_rate(name: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({by}) ({_rate(name, labels)})" if by else f"sum({_rate(name, labels)})"


def _each(name: str, by: str = "instance", labels: str = "") -> tuple[Query, ...]:
    """A gauge by its labels."""
    return (Query(_total(name, by, labels), _legend(by)),)


def _each_rate(name: str, by: str = "instance", labels: str = "") -> tuple[Query, ...]:
    """A counter's rate by its labels."""
    return (Query(_total_rate(name, by, labels), _legend(by)),)


def _legend(by: str) -> str:
    return " ".join("{{" + label + "}}" for label in by.split(", "))


def _mean(histogram: str, by: str = "") -> str:
    return f"{_total_rate(histogram + '_sum', by)} / {_total_rate(histogram + '_count', by)}"


def _share(counter: str, labels: str) -> str:
    return f"({_total_rate(counter, labels=labels)} or vector(0)) / {_total_rate(counter)}"


def _quantiles(histogram: str, by: str = "") -> tuple[Query, ...]:
    groups = f"le, {by}" if by else "le"
    return tuple(
        Query(
            f"histogram_quantile({share}, {_total_rate(histogram + '_bucket', groups)})",
            f"p{100 * share:.0f}" + (f" {_legend(by)}" if by else ""),
        )
        for share in (0.5, 0.9, 0.99)
    )


CLUSTER = (
    Panel(
        "Instances that take requests",
        "none",
        "By phase. 0: requests of this phase wait, then fail.",
        _each("kaveri_phase_ready", "phase"),
        kind="stat",
    ),
    Panel(
        "Processes",
        "none",
        "By role and version. More than one version: an upgrade goes on.",
        (Query(f"count by (role, version) ({_select('kaveri_build_info')})", "{{role}} {{version}}"),),
        kind="stat",
    ),
    Panel(
        "Cluster monitor",
        "none",
        "Routers that lead it: 1, except briefly.",
        (Query(_total("kaveri_monitor_leading"), "leaders"),),
        kind="stat",
    ),
    Panel(
        "Requests that ended",
        "reqps",
        "By outcome: the finish reason, or a gRPC status.",
        _each_rate("kaveri_router_requests_total", "outcome"),
        stacked=True,
    ),
    Panel(
        "Tokens",
        "none",
        "Tokens a second: of prompts, computed by prefill; of answers, received by routers.",
        (
            Query(_total_rate("kaveri_prefill_tokens_total"), "prompt"),
            Query(_total_rate("kaveri_router_relayed_tokens_total"), "answer"),
        ),
    ),
    Panel(
        "Time of a whole answer",
        "s",
        "From arrival at the router to the last token.",
        _quantiles("kaveri_router_e2e_seconds"),
    ),
    Panel(
        "Requests at routers",
        "none",
        "In flight, and those of them that no prefill instance accepts now.",
        (
            Query(_total("kaveri_router_in_flight_requests", "instance"), "{{instance}} in flight"),
            Query(_total("kaveri_router_waiting_requests", "instance"), "{{instance}} waiting"),
        ),
    ),
    Panel(
        "Requests at instances",
        "none",
        "Queued and running, by phase. A request that is handed over counts in both phases.",
        _each("kaveri_phase_requests", "phase, state"),
        stacked=True,
    ),
    Panel(
        "Prompt tokens that wait",
        "none",
        "Accepted by prefill and not computed yet.",
        _each("kaveri_prefill_queued_tokens"),
    ),
    Panel(
        "KV pools in use", "percentunit", "Share of each pool's blocks that is held.", _each("kaveri_kv_usage_ratio")
    ),
    Panel(
        "CPU",
        "none",
        "Cores that each process uses. A router that uses a whole one needs another beside it.",
        _each_rate("process_cpu_seconds_total"),
    ),
    Panel("Memory", "bytes", "Resident memory of each process.", _each("process_resident_memory_bytes")),
)

LATENCY = (
    Panel(
        "TTFT",
        "s",
        "From arrival at the router to the first token; counted when the answer ends.",
        _quantiles("kaveri_router_ttft_seconds"),
    ),
    Panel(
        "Where TTFT goes",
        "s",
        "Means. Queue and prompt are prefill's; the rest is the router, the network and attempts that were lost.",
        (
            Query(_mean("kaveri_prefill_queue_seconds"), "queue"),
            Query(_mean("kaveri_prefill_seconds"), "prompt"),
            Query(
                f"clamp_min({_mean('kaveri_router_ttft_seconds')} - {_mean('kaveri_prefill_queue_seconds')}"
                f" - {_mean('kaveri_prefill_seconds')}, 0)",
                "rest",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Prefill: queue",
        "s",
        "Until a request's first chunk. Large: prompts arrive faster than they are computed.",
        _quantiles("kaveri_prefill_queue_seconds"),
    ),
    Panel(
        "Prefill: prompt",
        "s",
        "From the first chunk to the first token. Large: long prompts, or many that share chunks.",
        _quantiles("kaveri_prefill_seconds"),
    ),
    Panel(
        "TPOT",
        "s",
        "Mean time per token after the first, one sample a request.",
        _quantiles("kaveri_router_tpot_seconds"),
    ),
    Panel(
        "Gap before the second token",
        "s",
        "Means of its parts: the push that prefill did not hide, the wait for the batch, one step.",
        (
            Query(_mean("kaveri_kv_tail_seconds"), "KV tail"),
            Query(_mean("kaveri_decode_queue_seconds"), "decode queue"),
            Query(_mean("kaveri_decode_step_seconds"), "step"),
        ),
        stacked=True,
    ),
    Panel(
        "Decode: step",
        "s",
        "Between the tokens of two steps. Large: large batches or long contexts.",
        _quantiles("kaveri_decode_step_seconds"),
    ),
    Panel(
        "Decode: queue",
        "s",
        "From the landing of the KV to the first token here. Large: --max-batch, --decode-policy, more instances.",
        _quantiles("kaveri_decode_queue_seconds"),
    ),
    Panel("Decode: all of it", "s", "From the first to the last token here.", _quantiles("kaveri_decode_seconds")),
    Panel(
        "Batch",
        "none",
        "Mean number of requests that gained a token in a step.",
        (Query(_mean("kaveri_decode_step_requests", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Preemptions",
        "ops",
        "Requests that lose their blocks and are computed again: the decode pool is too small.",
        _each_rate("kaveri_decode_preemptions_total"),
    ),
    Panel(
        "Length predictions",
        "ops",
        "By outcome. `none`: there is no predictor.",
        _each_rate("kaveri_predictions_total", "outcome"),
        stacked=True,
    ),
)

KV = (
    Panel(
        "KV pushed",
        "Bps",
        "Pushed by prefill and accepted, by transport.",
        _each_rate("kaveri_kv_transfer_bytes_total", "transport"),
        stacked=True,
    ),
    Panel("KV landed", "Bps", "Landed and verified, by receiver.", _each_rate("kaveri_kv_received_bytes_total")),
    Panel(
        "Placements",
        "ops",
        "Attempts of prefill to place a request at decode, by outcome.",
        _each_rate("kaveri_prefill_placements_total", "outcome"),
        stacked=True,
    ),
    Panel(
        "Transfer",
        "s",
        "From the ticket to the acceptance of the KV; most of it beside the prompt's computation.",
        _quantiles("kaveri_kv_transfer_seconds"),
    ),
    Panel(
        "Tail",
        "s",
        "From the first token to the acceptance: what prefill did not hide.",
        _quantiles("kaveri_kv_tail_seconds"),
    ),
    Panel(
        "Reservation to landing",
        "s",
        "At decode: how long blocks are reserved and empty.",
        _quantiles("kaveri_decode_landing_seconds"),
    ),
    Panel(
        "Waits for credit",
        "percentunit",
        "Share of the time in which all that is queued for a receiver waits for its credit; the sum over receivers.",
        _each_rate("kaveri_kv_credit_wait_seconds_total"),
    ),
    Panel(
        "Bytes under way",
        "bytes",
        "By sender and receiver: computed and not written; written and not accepted.",
        (
            Query(_total("kaveri_kv_push_queued_bytes", "instance, peer"), "{{instance}} to {{peer}} queued"),
            Query(_total("kaveri_kv_push_unaccepted_bytes", "instance, peer"), "{{instance}} to {{peer}} written"),
        ),
    ),
    Panel(
        "Credit of senders",
        "bytes",
        "What each receiver allows to be written now.",
        (Query(_total("kaveri_kv_push_credit_bytes", "instance, peer"), "{{instance}} to {{peer}}"),),
    ),
    Panel(
        "Credit of receivers",
        "bytes",
        "The window of each sender, and the credit that is granted and not returned.",
        (
            Query(_total("kaveri_kv_credit_window_bytes", "instance"), "{{instance}} window"),
            Query(_total("kaveri_kv_credit_held_bytes", "instance"), "{{instance}} held"),
        ),
    ),
    Panel(
        "Blocks that wait for KV",
        "none",
        "Leased to open transfers, or quarantined: a sender that hangs may still write to them.",
        _each("kaveri_kv_landing_blocks", "instance, state"),
    ),
    Panel(
        "In line for room",
        "none",
        "Requests that wait at decode until blocks come free.",
        _each("kaveri_decode_line_requests"),
    ),
)

RECOVERY = (
    Panel(
        "Attempts lost",
        "ops",
        "Placements that failed because an instance died, hung or refused. They are resumed, or computed again.",
        _each_rate("kaveri_router_lost_attempts_total"),
    ),
    Panel(
        "Suspicions",
        "ops",
        "An instance went silent while requests waited for it.",
        _each_rate("kaveri_router_suspicions_total"),
    ),
    Panel(
        "Stall",
        "s",
        "From the last token before a loss to the next one, by what came after.",
        _quantiles("kaveri_router_stall_seconds", "outcome"),
    ),
    Panel(
        "Resumes",
        "ops",
        "What holders of copies were asked for. All but `resumed` are computed again.",
        _each_rate("kaveri_router_resumes_total", "outcome"),
    ),
    Panel(
        "Tokens of resumed requests",
        "none",
        "Tokens a second by where their KV came from: held in the copy, or computed again.",
        _each_rate("kaveri_resumed_tokens_total", "source"),
    ),
    Panel(
        "Re-attaches",
        "ops",
        "Requests of clients that changed the router.",
        _each_rate("kaveri_router_reattaches_total", "outcome"),
    ),
    Panel(
        "Requests with a copy",
        "none",
        "Requests in decode of which another instance holds a copy, and those that are worth one and have none yet.",
        (
            Query(_total("kaveri_replicas_owned"), "with a copy"),
            Query(_total("kaveri_unprotected_requests"), "without"),
        ),
        stacked=True,
    ),
    Panel(
        "Lag of copies",
        "none",
        "Most tokens of one request that its copy lacks. They are computed again after a loss.",
        _each("kaveri_replica_lag_tokens"),
    ),
    Panel("Memory for copies", "bytes", "Used and free.", _each("kaveri_replica_bytes", "instance, state")),
    Panel(
        "Tokens copied",
        "none",
        "Tokens a second whose KV was copied to holders.",
        _each_rate("kaveri_replica_copied_tokens_total"),
    ),
    Panel(
        "Copies asked for and lost",
        "ops",
        "Holders asked, by outcome; copies that ended before their requests; requests that moved in a drain.",
        (
            Query(_total_rate("kaveri_replica_opens_total", "outcome"), "asked: {{outcome}}"),
            Query(_total_rate("kaveri_replica_losses_total"), "lost"),
            Query(_total_rate("kaveri_replica_moves_total"), "moved"),
        ),
    ),
    Panel(
        "Requests without a router",
        "none",
        "They go on for --orphan-grace-s and wait for a router.",
        (
            Query(_total("kaveri_prefill_orphans", "instance"), "{{instance}} prefill"),
            Query(_total("kaveri_decode_orphans", "instance"), "{{instance}} decode"),
        ),
    ),
)

GATEWAY = (
    Panel(
        "HTTP requests",
        "reqps",
        "By path and status. 499: the client has gone. 0: it did not read.",
        _each_rate("kaveri_gateway_requests_total", "path, status"),
        stacked=True,
    ),
    Panel("TTFT", "s", "From a request's arrival to its first event.", _quantiles("kaveri_gateway_ttft_seconds")),
    Panel("Tokens", "none", "Tokens a second that were streamed.", _each_rate("kaveri_gateway_streamed_tokens_total")),
    Panel("Answers in flight", "none", "By gateway.", _each("kaveri_gateway_in_flight_answers")),
    Panel("Connections", "none", "Open HTTP connections.", _each("kaveri_gateway_connections")),
    Panel("Bodies", "bytes", "Of requests in flight; at most --max-bodies-bytes.", _each("kaveri_gateway_body_bytes")),
    Panel(
        "Failed requests",
        "percentunit",
        "Share with a status of 500 or more.",
        (Query(_share("kaveri_gateway_requests_total", 'status=~"5.."'), "5xx"),),
    ),
)

DASHBOARDS = {
    "cluster": ("Kaveri: cluster", CLUSTER),
    "latency": ("Kaveri: TTFT and TPOT, by prefill and decode", LATENCY),
    "kv": ("Kaveri: KV transfer and credit", KV),
    "recovery": ("Kaveri: replicas and recovery", RECOVERY),
    "gateway": ("Kaveri: gateway", GATEWAY),
}


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    refreshed = {"datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2} if kind == "query" else {}
    return {"name": name, "type": kind, "query": query, **refreshed}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    y, x = divmod(number, _PER_ROW)
    custom = {"fillOpacity": 10, "stacking": {"mode": "normal", "group": "A"}} if panel.stacked else {}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "gridPos": {"x": _WIDTH * x, "y": _HEIGHT * y, "w": _WIDTH, "h": _HEIGHT},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """As Grafana imports it. It asks for a data source and for the scrape job of a cluster."""
    title, panels = DASHBOARDS[name]
    variables = [
        _variable("datasource", "datasource", "prometheus"),
        _variable("job", "query", "label_values(kaveri_build_info, job)"),
    ]
    return {
        "uid": f"kaveri-{name}",
        "title": title,
        "tags": ["kaveri"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "Kaveri", "tags": ["kaveri"], "asDropdown": True, "keepTime": True}],
        "templating": {"list": variables},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def write(folder: Path) -> None:
    """Writes one file for each dashboard. Each panel is a line, so that a change shows as one."""
    for name in DASHBOARDS:
        shown = dashboard(name)
        panels = ",\n".join("  " + json.dumps(panel) for panel in shown.pop("panels"))
        head = json.dumps(shown, indent=1).removesuffix("\n}")
        (folder / f"{name}.json").write_text(f'{head},\n "panels": [\n{panels}\n ]\n}}\n')


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
