"""Structured logs: one JSON object per line on stderr, with the service and the instance on every line.

Lines about a request carry request_id and attempt: `log = get_logger().bind(request_id=..., attempt=...)`.
"""

import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger

from kaveri.errors import ConfigError


def configure_logs(service: str, instance_id: str, level: str = "info") -> None:
    """Sets the process's logging up, once. level: debug, info, warning or error; ConfigError for anything else."""
    severity = logging.getLevelNamesMapping().get(level.upper())
    if severity is None:
        raise ConfigError("--log-level", f"{level!r} is none of debug, info, warning, error")
    structlog.configure(
        processors=[
            # Constants, not context variables: engine and transport threads log too, and have no context of ours.
            partial(_add_constants, {"service": service, "instance_id": instance_id}),
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


def _add_constants(constants: Mapping[str, str], _logger: Any, _method: str, event: EventDict) -> EventDict:
    return {**constants, **event}
