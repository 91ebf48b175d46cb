"""Reads published traces: arrival times and lengths of requests. They contain no prompts."""

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths, Workload

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_trace(path: Path, count: int) -> Workload:
    """Return the lengths and times of a trace's first `count` requests, in order of arrival, the first at 0.

    Formats, detected by the first line: the CSV of the Azure LLM inference traces of 2023, and Mooncake's JSON lines
    (timestamp in milliseconds, input_length, output_length). Raises ConfigError with the line and the reason.
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = _mooncake_rows(file, path) if first.startswith("{") else _azure_rows(file, path)
            taken = list(islice(rows, count))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("--trace", f"{path} cannot be read: {error}") from error
    if not taken:
        raise ConfigError("--trace", f"{path} has no requests")
    taken.sort(key=lambda row: row[0])
    start_s = taken[0][0]
    return Workload(lengths=[lengths for _, lengths in taken], times_s=[time_s - start_s for time_s, _ in taken])


def _azure_rows(file: TextIO, path: Path) -> Iterator[tuple[float, RequestLengths]]:
    rows = csv.reader(file)
    header = next(rows, [])
    if header != _AZURE_HEADER:
        raise _malformed(path, 1, f"is neither a JSON object nor the header {','.join(_AZURE_HEADER)}")
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            time, prompt_tokens, output_tokens = row
            yield datetime.fromisoformat(time).timestamp(), _lengths(int(prompt_tokens), int(output_tokens))
        except (ValueError, OverflowError) as error:
            raise _malformed(path, number, str(error)) from error


def _mooncake_rows(file: TextIO, path: Path) -> Iterator[tuple[float, RequestLengths]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _time_s(row["timestamp"]), _lengths(int(row["input_length"]), int(row["output_length"]))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise _malformed(path, number, str(error)) from error
        except KeyError as error:
            raise _malformed(path, number, f"has no {error}") from error


def _time_s(milliseconds: float | str) -> float:
    time_s = float(milliseconds) / 1e3
    if not math.isfinite(time_s):
        raise ValueError(f"timestamp is {milliseconds}; it must be a finite number")
    return time_s


def _lengths(prompt_tokens: int, output_tokens: int) -> RequestLengths:
    if prompt_tokens < 1 or output_tokens < 1:
        raise ValueError(f"lengths of {prompt_tokens} and {output_tokens} tokens; both must be at least 1")
    return RequestLengths(prompt_tokens, output_tokens)


def _malformed(path: Path, line_number: int, reason: str) -> ConfigError:
    return ConfigError("--trace", f"{path}, line {line_number}: {reason}")
