"""Structured logs: one JSON object per line on stderr, with the service and the instance on every line.

Lines about a request carry request_id and attempt: `log = get_logger().bind(request_id=..., attempt=...)`.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger

from kaveri.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How a process logs. Plain values: an instance gives them to the processes of its ranks."""

    service: str
    instance_id: str
    level: str
    rank: int | None = None
    """Of a process that is one tensor-parallel rank of an instance."""

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        """Structlog's processor that puts them on every line. Not context variables: engine and transport threads log
        too, and have no context of ours."""
        rank = {} if self.rank is None else {"rank": self.rank}
        return {"service": self.service, "instance_id": self.instance_id, **rank, **event}


def log_settings() -> LogSettings | None:
    """What this process's logs were configured with; None before."""
    first = next(iter(structlog.get_config()["processors"]), None)
    return first if isinstance(first, LogSettings) else None


def configure_logs(service: str, instance_id: str, level: str = "info", rank: int | None = None) -> None:
    """Sets the process's logging up, once. level: debug, info, warning or error; ConfigError for anything else.

    rank: see LogSettings.
    """
    severity = logging.getLevelNamesMapping().get(level.upper())
    if severity is None:
        raise ConfigError("--log-level", f"{level!r} is none of debug, info, warning, error")
    structlog.configure(
        processors=[
            LogSettings(service, instance_id, level, rank),
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
    """The process's logger."""
    return cast(FilteringBoundLogger, structlog.get_logger())
