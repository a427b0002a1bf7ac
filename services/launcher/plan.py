"""Which processes a deployment has, where each listens, and what each is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.launcher.cores import thread_env, threads_per_worker
from services.launcher.nats_server import nats_command
from services.launcher.ports import free_port
from services.launcher.supervisor import ProcessSpec

POOLS = ("prefill", "decode")
_DEFAULT_DRAIN_S = "30"  # of ProcessSettings
_MARGIN_S = 10.0  # from the end of the drain to SIGKILL


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs and is reached: another address, and a command that leads there (`ip netns exec NAME`)."""

    host: str = "127.0.0.1"
    via: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a deployment."""

    name: str  # gateway, kvtransfer, nats, prefill-0, decode-1
    role: str
    place: Place
    port: int  # gateway: HTTP; nats: clients; else gRPC
    admin_port: int

    @property
    def address(self) -> str:
        """host:port of the work it does."""
        return f"{self.place.host}:{self.port}"

    @property
    def admin_url(self) -> str:
        """Base of /metrics, /live, /ready and /debug (nats: its monitoring)."""
        return f"http://{self.place.host}:{self.admin_port}"

    @property
    def ready_url(self) -> str:
        """Answers 200 once it can work."""
        return self.admin_url + ("/healthz" if self.role == "nats" else "/ready")


@dataclass(frozen=True, slots=True)
class Options:
    """What a deployment is made of. None leaves the default of the process concerned.

    `env` adds to the environment of one process ("prefill-0"), of a role ("prefill") or of all ("*"); the nearer wins.
    `places` puts single processes elsewhere, by name.
    """

    model: str = "smollm2-135m"
    prefill: int = 1
    decode: int = 1
    transport: str = "nixl"
    dtype: str = "auto"
    port: int | None = None  # of the gateway; None: any free one
    threads: int | None = None  # per worker; None: the cores shared out
    kv_memory_mb_prefill: int | None = None
    kv_memory_mb_decode: int | None = None
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)


class Plan:
    """The members of a deployment, and how to start each."""

    def __init__(self, options: Options) -> None:
        """Chooses the ports. Raises OSError where none is free."""
        self._options = options
        self._threads = options.threads or threads_per_worker(options.prefill + options.decode)
        pools = {"prefill": options.prefill, "decode": options.decode}
        workers = [(f"{role}-{i}", role) for role in POOLS for i in range(pools[role])]
        roles = [("nats", "nats"), ("kvtransfer", "kvtransfer"), *workers, ("gateway", "gateway")]
        self.members = {name: self._member(name, role) for name, role in roles}

    @property
    def transport(self) -> str:
        """What moves KV blocks."""
        return self._options.transport

    def of_role(self, *roles: str) -> list[Member]:
        """The members with these roles, in order of their start."""
        return [member for member in self.members.values() if member.role in roles]

    def spec(self, member: Member) -> ProcessSpec:
        """How to start a member. Raises NoNatsServerError."""
        via = member.place.via
        if member.role == "nats":
            return ProcessSpec(member.name, (*via, *nats_command(member.place.host, member.port, member.admin_port)))
        env = self._env(member)
        drain_s = float(env.get("PDSERVE_DRAIN_S", _DEFAULT_DRAIN_S))
        command = (*via, sys.executable, "-m", f"services.{member.role}")
        return ProcessSpec(member.name, command, env, stop_s=drain_s + _MARGIN_S)

    def _member(self, name: str, role: str) -> Member:
        place = self._options.places.get(name, Place())
        wanted = self._options.port if role == "gateway" else None
        return Member(name, role, place, wanted or free_port(), free_port())

    def _env(self, member: Member) -> dict[str, str]:
        options = self._options
        env = {
            "PDSERVE_WORKER_ID": member.name,
            "PDSERVE_HOST": member.place.host,
            "PDSERVE_ADVERTISE_HOST": member.place.host,
            "PDSERVE_PORT": str(member.port),
            "PDSERVE_ADMIN_PORT": str(member.admin_port),
            "PDSERVE_NATS_URL": f"nats://{self.members['nats'].address}",
            "PDSERVE_DIRECTORY": self.members["kvtransfer"].address,
            "PDSERVE_MODEL": options.model,
            "PYTHONUNBUFFERED": "1",
            **thread_env(self._threads if member.role in POOLS else 1),
        }
        if member.role in POOLS:
            env |= self._pool_env(member.role)
        for key in ("*", member.role, member.name):
            env |= options.env.get(key, {})
        return env

    def _pool_env(self, role: str) -> dict[str, str]:
        options = self._options
        memory_mb = {"prefill": options.kv_memory_mb_prefill, "decode": options.kv_memory_mb_decode}[role]
        env = {
            "PDSERVE_THREADS": str(self._threads),
            "PDSERVE_DTYPE": options.dtype,
            "PDSERVE_TRANSPORT": options.transport,
        }
        return env if memory_mb is None else env | {"PDSERVE_KV_MEMORY_MB": str(memory_mb)}
