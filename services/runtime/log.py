"""Logs: structlog to stderr, text for people or JSON for collectors. Prompts and outputs never go in."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog


def configure(level: str, json: bool, **bound: str) -> None:
    """Sets this process's log form; `bound` (role, worker_id) stands on every line."""
    renderer: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")


def get_logger() -> structlog.stdlib.BoundLogger:
    """A logger; call with an event in plain words and fields: `log.info("draining", left=3)`."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger())
