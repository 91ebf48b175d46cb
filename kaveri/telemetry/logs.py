"""Structured logs: one JSON object per line on stderr, with the service and the instance on every line.

Events are snake_case noun_verb and listed in docs/operations.md. Lines about a request carry request_id and attempt:
`log = get_logger().bind(request_id=..., attempt=...)`.

Logging never raises, because threads log in the middle of their work and within `except`. A line that cannot be
written (full disk, closed stderr) is lost.
"""

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

from kaveri.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Logging settings of a process. Picklable: an instance passes them to its tensor-parallel processes."""

    service: str
    instance_id: str
    level: str
    rank: int | None = None
    """Tensor-parallel rank of the process within its instance; None if the process is not a rank."""


_settings: LogSettings | None = None


def log_settings() -> LogSettings | None:
    """Return the arguments of configure_logs(); None if it was not called."""
    return _settings


def configure_logs(service: str, instance_id: str, level: str = "info", rank: int | None = None) -> None:
    """Set up the process's logging, once. level: debug, info, warning or error; ConfigError otherwise. rank:
    tensor-parallel rank of this process; None for none."""
    severity = logging.getLevelNamesMapping().get(level.upper())
    if severity is None:
        raise ConfigError("--log-level", f"{level!r} is none of debug, info, warning, error")
    global _settings  # noqa: PLW0603 - of the process, as structlog's configuration is
    _settings = LogSettings(service, instance_id, level, rank)
    on_each_line = {"service": service, "instance_id": instance_id} | ({} if rank is None else {"rank": rank})
    structlog.configure(
        processors=[
            # Context variables would not reach engine and transport threads.
            lambda _logger, _method, event: {**on_each_line, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger() -> FilteringBoundLogger:
    """Return the process's logger. Its calls never raise, even before configure_logs."""
    return cast(FilteringBoundLogger, _SafeLogger({}))


@dataclass(frozen=True, slots=True)
class _SafeLogger:
    """Logger that looks up structlog's logger for each line, so an error loses only that line."""

    values: dict[str, Any]

    def bind(self, **values: Any) -> "_SafeLogger":
        return _SafeLogger({**self.values, **values})

    def __getattr__(self, level: str) -> Callable[..., None]:
        def log(event: str, **values: Any) -> None:
            with contextlib.suppress(Exception):
                getattr(structlog.get_logger(), level)(event, **{**self.values, **values})

        return log
