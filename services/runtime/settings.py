"""Settings of a process: environment `PDSERVE_*` and `--kebab-flags`, frozen once read.

Each room declares its own settings next to the code that uses them, on top of `ProcessSettings`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

S = TypeVar("S", bound="ProcessSettings")


class ProcessSettings(BaseSettings):
    """What every process of pdserve can be told."""

    model_config = SettingsConfigDict(
        env_prefix="PDSERVE_", frozen=True, extra="forbid", cli_kebab_case=True, cli_hide_none_type=True
    )

    worker_id: str = Field("", max_length=128, description="stable name; empty: ROLE-HOSTNAME")
    host: str = Field("127.0.0.1", description="address to listen on")
    advertise_host: str = Field("", description="address that others reach this process at; empty: host")
    port: int = Field(0, ge=0, le=65535, description="gRPC port (gateway: HTTP port); 0: any free one")
    admin_port: int = Field(0, ge=0, le=65535, description="port of /metrics, /live, /ready, /debug; 0: any free one")
    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS servers, comma separated")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    log_json: bool = Field(False, description="one JSON object per line instead of text")
    drain_s: float = Field(30.0, ge=0, description="how long SIGTERM lets running work finish")

    @property
    def advertised_host(self) -> str:
        """The host that goes into addresses handed to others."""
        return self.advertise_host or self.host

    def name(self, role: str) -> str:
        """The stable worker id."""
        return self.worker_id or f"{role}-{socket.gethostname()}"


def load(cls: type[S], prog: str, argv: Sequence[str] | None = None) -> S:
    """Reads flags over environment over defaults.

    Exits with status 2 and one line per wrong field, each naming it.
    """
    try:
        return CliApp.run(cls, cli_args=list(sys.argv[1:] if argv is None else argv))
    except ValidationError as error:
        lines = [f"{prog}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        sys.stderr.write("\n".join(lines) + "\n")
        raise SystemExit(2) from None
