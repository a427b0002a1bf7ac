"""NATS subjects. Built only from ids that pdserve made itself, so no client text can reach one."""

from __future__ import annotations

import re

_SAFE = re.compile(r"[^A-Za-z0-9_-]")

HEARTBEATS = "pdserve.heartbeat.>"


def token_subject(gateway_id: str, epoch: str) -> str:
    """Where the tokens of all of one gateway life's requests are published."""
    return f"pdserve.tokens.{_part(gateway_id)}.{_part(epoch)}"


def heartbeat_subject(role: str, worker_id: str) -> str:
    """Where a worker publishes its heartbeat."""
    return f"pdserve.heartbeat.{_part(role)}.{_part(worker_id)}"


def _part(text: str) -> str:
    """One subject token: dots, wildcards and spaces replaced, since they would change the subject's meaning."""
    if not text:
        raise ValueError("a subject part is empty")
    return _SAFE.sub("_", text)
