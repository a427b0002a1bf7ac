"""A whole pdserve on this machine: NATS, the kvtransfer directory, both pools, the gateway.

1. NATS and the directory start; both must be ready.
2. Workers and the gateway start together.
3. Every process is asked over HTTP whether it is ready; one that ends before is a StartError with its last lines. The
   gateway must know every worker, so that the first request takes the path it is meant to.
4. `close()` ends all in the reverse order, then what they left in shared memory.

Used by `pdserve up`, `pdserve demo` and the end-to-end tests:

    with Deployment(model="tiny-random-llama", prefill=2, decode=1) as house:
        httpx2.post(f"{house.gateway_url}/v1/completions", ...)
        house.kill("prefill-0")
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import httpx2

from services.launcher.plan import POOLS, Member, Options, Plan
from services.launcher.ports import is_free
from services.launcher.scrape import Samples, scrape
from services.launcher.supervisor import Log, Supervisor
from services.launcher.sweeper import Sweeper

USAGE_ERROR = 2  # exit status of a process that cannot do what it was told: starting it again changes nothing
_POLL_S = 0.05
_KNOWN = "pdserve_gateway_workers"
_SILENT = "has not answered yet"
_STAGES = (("nats", "kvtransfer"), (*POOLS, "gateway"))


class StartError(RuntimeError):
    """A process ended, or was not ready in time; the text holds its name and its last lines."""


class Deployment:
    """The processes, their addresses, and the means to hurt them. A context manager: enters ready, leaves nothing.

    The keywords not named here are those of `Options`. `log(name, line)` gets every line printed, `on_state(name, what
    it waits for)` each change of a process that starts (None: it is ready).
    """

    def __init__(
        self,
        *,
        restart: bool = False,
        start_timeout_s: float = 180.0,
        log: Log = lambda name, line: None,
        on_state: Callable[[str, str | None], None] = lambda name, waits_for: None,
        **options: Any,
    ) -> None:
        self._plan = Plan(Options(**options))
        self._restart = restart
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._on_state = on_state
        self._supervisor: Supervisor | None = None
        self._sweeper: Sweeper | None = None

    # addresses

    @property
    def members(self) -> dict[str, Member]:
        """The processes by name, in order of their start."""
        return self._plan.members

    @property
    def workers(self) -> list[Member]:
        """Both pools, prefill first."""
        return self._plan.of_role(*POOLS)

    @property
    def gateway_url(self) -> str:
        """Base of the OpenAI-style API, without /v1."""
        return f"http://{self.members['gateway'].address}"

    @property
    def transport(self) -> str:
        """What moves KV blocks."""
        return self._plan.transport

    @property
    def nats_url(self) -> str:
        """What NATS clients connect to."""
        return f"nats://{self.members['nats'].address}"

    # life

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Returns when all are ready. Raises StartError."""
        gateway = self.members["gateway"]
        if not gateway.place.via and not is_free(gateway.port, gateway.place.host):
            raise StartError(f"port {gateway.port} is taken: choose another (--port), or end what listens there")
        self._sweeper = Sweeper()
        self._supervisor = Supervisor(self._log, self._restart, on_start=self._sweeper.watch)
        for roles in _STAGES:
            members = self._plan.of_role(*roles)
            for member in members:
                self._supervisor.start(self._plan.spec(member))
            self.wait_ready(*(member.name for member in members))
        self.wait_known()

    def wait_ready(self, *names: str, timeout_s: float | None = None) -> None:
        """Waits until the named processes (none named: all) are ready. Raises StartError."""
        waiting = dict.fromkeys(names or self.members, _SILENT)
        deadline_s = time.monotonic() + (timeout_s or self._start_timeout_s)
        with httpx2.Client(timeout=2.0, trust_env=False) as client:
            while waiting:
                for name in list(waiting):
                    self._refuse_ended(name)
                    waits_for = _ask_ready(client, self.members[name])
                    if waits_for != waiting[name]:
                        self._on_state(name, waits_for)
                    if waits_for is None:
                        del waiting[name]
                    else:
                        waiting[name] = waits_for
                if waiting and time.monotonic() > deadline_s:
                    name, why = next(iter(waiting.items()))
                    raise StartError(f"{name} is not ready: {why}\n{self._last_lines(name)}")
                time.sleep(_POLL_S if waiting else 0)

    def wait_known(self, timeout_s: float | None = None) -> None:
        """Waits until the gateway has heard of every worker. Raises StartError."""
        wanted = {role: len(self._plan.of_role(role)) for role in POOLS}
        deadline_s = time.monotonic() + (timeout_s or self._start_timeout_s)
        while (known := {role: int(self.samples("gateway").total(_KNOWN, role=role)) for role in POOLS}) != wanted:
            if time.monotonic() > deadline_s:
                raise StartError(f"the gateway knows {known} workers of {wanted}\n{self._last_lines('gateway')}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends every process and what it left; idempotent."""
        if self._supervisor is not None:
            for roles in (("gateway",), POOLS):
                names = [member.name for member in self._plan.of_role(*roles)]
                self._supervisor.stop(*(name for name in names if self._supervisor.knows(name)))
            self._supervisor.close()
        if self._sweeper is not None:
            self._sweeper.close()

    def abandon(self) -> None:
        """Ends every process at once, without its consent; `close` still sweeps."""
        if self._supervisor is not None:
            for name in self.members:
                if self._supervisor.knows(name):
                    self._supervisor.signal(name, signal.SIGKILL)

    # single processes

    @property
    def supervisor(self) -> Supervisor:
        """What keeps the processes. Raises RuntimeError before `start`."""
        if self._supervisor is None:
            raise RuntimeError("the deployment is not started")
        return self._supervisor

    def pid(self, name: str) -> int | None:
        """Its pid; None where it is not running."""
        return self.supervisor.pid(name)

    def signal(self, name: str, number: int) -> None:
        """Sends a signal: SIGSTOP freezes it, SIGCONT thaws it, SIGTERM drains it."""
        self.supervisor.signal(name, number)

    def kill(self, name: str, timeout_s: float = 10.0) -> None:
        """SIGKILL, and waits for the end of that life."""
        self.supervisor.signal(name, signal.SIGKILL)
        self.supervisor.wait(name, timeout_s)

    def stop(self, name: str, timeout_s: float | None = None) -> int | None:
        """SIGTERM, drain, end; returns the exit code."""
        self.supervisor.stop(name, timeout_s=timeout_s)
        return self.supervisor.exit_code(name)

    def restart(self, name: str) -> None:
        """A new life at the same addresses, after the old one was stopped or killed; returns when it is ready."""
        self.supervisor.start(self._plan.spec(self.members[name]))
        self.wait_ready(name)

    def samples(self, name: str) -> Samples:
        """What the process tells Prometheus now. Raises httpx2.HTTPError."""
        return scrape(self.members[name].admin_url)

    def debug(self, name: str, page: str) -> Any:
        """The JSON of /debug/`page` ("blocks") of a process. Raises httpx2.HTTPError."""
        url = f"{self.members[name].admin_url}/debug/{page}"
        return httpx2.get(url, timeout=10.0, trust_env=False).raise_for_status().json()

    def _refuse_ended(self, name: str) -> None:
        code = self.supervisor.exit_code(name)
        if code == USAGE_ERROR or (not self._restart and self.supervisor.wait(name, 0)):
            raise StartError(f"{name} ended with {code} before it was ready\n{self._last_lines(name)}")

    def _last_lines(self, name: str) -> str:
        return "\n".join(f"  {name} | {line}" for line in self.supervisor.tail(name))


def _ask_ready(client: httpx2.Client, member: Member) -> str | None:
    """None where it is ready, else what it waits for."""
    try:
        answer = client.get(member.ready_url)
    except httpx2.HTTPError:
        return _SILENT
    return None if answer.status_code == 200 else answer.text[:200]
