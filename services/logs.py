"""Structured logs: one JSON object per line on stdout, with service, instance and incarnation.

``structlog.get_logger()`` anywhere; pass ``rid=`` and ``attempt=`` where a request is meant. Per
step nothing is logged above debug. Never log prompts, keys or tool arguments; the few places that
could ask ``config.log_content``.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import msgspec
import structlog

from decant.protocol.config import Config

_json = msgspec.json.Encoder(enc_hook=repr)


def _dumps(event: Any, **_: Any) -> bytes:
    return _json.encode(event)


def _text(event: Any, **_: Any) -> str:
    return _json.encode(event).decode()


class _WithoutRequests(logging.Filter):
    """aiohttp puts the bytes that it could not parse, keys included, into its exceptions' text."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__.startswith("aiohttp."):
            record.msg, record.args = f"bad HTTP: {type(error).__name__}", ()
            record.exc_info = record.exc_text = None
        return True


def setup(service: str, instance: str, config: Config, incarnation: str = "") -> None:
    """Configure structlog and the standard library's logging (aiohttp, asyncio) alike.

    config.log_level: debug, info, warning, error. An unknown level counts as info.
    """
    level = getattr(logging, config.log_level.upper(), logging.INFO)

    def stamp(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["svc"], event["instance"], event["pid"] = service, instance, os.getpid()
        if incarnation:
            event["incarnation"] = incarnation
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        stamp,
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_text),
            ],
        )
    )
    root = logging.getLogger()
    if not config.log_content:
        handler.addFilter(_WithoutRequests())
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))
