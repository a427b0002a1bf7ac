"""Who the workers are, from their heartbeats.

1. A heartbeat from an unknown process makes it a member, whatever came before. The same worker_id with another epoch,
   or the same address with another worker_id, is a restart: the earlier process is over.
2. A process that is over stays over. Should it still be heard of (messages may arrive late, and the first heard need
   not be the elder), nobody guesses: the address is asked over gRPC who lives there, and that answer settles it.
3. A member that falls silent, or that a caller suspects, is asked over gRPC before it is lost. Lost is not over: a
   thawed worker's next heartbeat brings it back.
4. While the bus is down the membership is frozen: silence proves nothing, only suspicion by a caller is followed up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import Counter, Gauge

from services.runtime import log

MEMBERS = Gauge("pdserve_gateway_workers", "workers known and not lost", ["role"])
LOST = Counter("pdserve_gateway_workers_lost_total", "workers that answered neither bus nor gRPC", ["role"])
RESTARTS = Counter("pdserve_gateway_worker_restarts_total", "workers seen with a new epoch", ["role"])
STRANGERS = Counter("pdserve_gateway_heartbeats_refused_total", "heartbeats not taken", ["reason"])

MAX_REMEMBERED = 4096  # processes known to be over


class WorkerKey(NamedTuple):
    """One life of one worker."""

    worker_id: str
    epoch: str


class Role(StrEnum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker said it was."""

    num_waiting: int = 0
    num_running: int = 0
    num_receiving: int = 0
    backlog_tokens: int = 0
    tokens_per_s: float = 0.0  # 0: not measured yet
    step_s: float = 0.0
    num_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's last heartbeat."""

    key: WorkerKey
    role: Role
    address: str
    model: str
    weights_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    layout_fingerprint: str = ""
    draining: bool = False
    leaving: bool = False
    max_model_len: int = 0
    load: Load = field(default_factory=Load)
    runnable: bool = False
    since_last_step_s: float = 0.0


@dataclass(slots=True)
class _Member:
    info: WorkerInfo
    heard_s: float  # last heartbeat, or last answer over gRPC
    suspected: bool = False


class Membership:
    """The one owner of what this gateway believes about the pools. No I/O: `asking` says whom to ask."""

    def __init__(
        self,
        model: str,
        tokenizer_fingerprint: str,
        clock: Callable[[], float],
        bus_up: Callable[[], bool],
        silence_s: float,
    ) -> None:
        """Workers of another model or with another tokenizer are refused; an empty fingerprint compares as equal."""
        self._model = model
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._clock = clock
        self._bus_up = bus_up
        self._silence_s = silence_s
        self._members: dict[str, _Member] = {}
        self._over: OrderedDict[WorkerKey, None] = OrderedDict()
        self._disputed: dict[WorkerKey, WorkerInfo] = {}
        self._refused: set[WorkerKey] = set()
        self._on_gone: list[Callable[[WorkerKey], None]] = []
        self._log = log.get_logger()
        self.max_model_len = 0  # of the largest decode worker ever seen; kept when the pool is scaled to zero

    def on_gone(self, listener: Callable[[WorkerKey], None]) -> None:
        """Calls `listener(key)` when a member is lost, has left or was replaced."""
        self._on_gone.append(listener)

    def observe(self, info: WorkerInfo) -> None:
        """Takes a heartbeat."""
        if reason := self._stranger(info):
            STRANGERS.labels(reason).inc()
            if info.key not in self._refused:
                self._refused.add(info.key)
                self._log.warning("worker refused", worker_id=info.key.worker_id, reason=reason)
            return
        if info.key in self._over:
            if not info.leaving:
                self._disputed[info.key] = info
            return
        if info.leaving:
            self._end(info.key)
            return
        for other in [member.info for member in self._members.values()]:
            same_name = other.key.worker_id == info.key.worker_id
            if other.key != info.key and (same_name or other.address == info.address):
                RESTARTS.labels(other.role.value).inc()
                self._end(other.key)
        known = self._members.get(info.key.worker_id)
        self._members[info.key.worker_id] = _Member(info, self._clock(), known.suspected if known else False)
        if info.role is Role.DECODE:
            self.max_model_len = max(self.max_model_len, info.max_model_len)
        if known is None:
            self._log.info("worker joined", worker_id=info.key.worker_id, role=info.role.value, address=info.address)
            self._count()

    def workers(self, role: Role) -> tuple[WorkerInfo, ...]:
        """The members of a pool, draining ones included."""
        return tuple(member.info for member in self._members.values() if member.info.role is role)

    def get(self, key: WorkerKey) -> WorkerInfo | None:
        """The member that is this very process, if it is one."""
        member = self._members.get(key.worker_id)
        return member.info if member is not None and member.info.key == key else None

    def suspect(self, key: WorkerKey) -> None:
        """A caller had trouble with it: ask it soon."""
        if self.get(key) is not None:
            self._members[key.worker_id].suspected = True

    def asking(self) -> tuple[WorkerInfo, ...]:
        """Whom to ask over gRPC now: the silent, the suspected, and those heard of after they were over."""
        now = self._clock()
        silent = self._bus_up()
        members = [
            member.info
            for member in self._members.values()
            if member.suspected or (silent and now - member.heard_s > self._silence_s)
        ]
        disputed, self._disputed = list(self._disputed.values()), {}
        return (*members, *disputed)

    def settle(self, asked: WorkerInfo, answer: WorkerKey | None) -> None:
        """What came back from asking at `asked.address`: who lives there, or None for nobody."""
        member = self._members.get(asked.key.worker_id)
        if answer == asked.key:
            if self.get(asked.key) is None:  # over by mistake
                self._over.pop(asked.key, None)
                self.observe(asked)
            elif member is not None:
                member.heard_s, member.suspected = self._clock(), False
        elif self.get(asked.key) is None:
            return  # it is over indeed
        elif answer is None:
            self.lose(asked.key)
        else:
            self._end(asked.key)

    def lose(self, key: WorkerKey) -> None:
        """It answers nothing. Its next heartbeat, if one ever comes, brings it back."""
        info = self.get(key)
        if info is not None:
            LOST.labels(info.role.value).inc()
            self._log.warning("worker lost", worker_id=key.worker_id, role=info.role.value, address=info.address)
            self._forget(key)

    def thaw(self) -> None:
        """The bus is back: silence counts from now."""
        for member in self._members.values():
            member.heard_s = self._clock()

    def _stranger(self, info: WorkerInfo) -> str | None:
        if info.model != self._model:
            return "model"
        ours, theirs = self._tokenizer_fingerprint, info.tokenizer_fingerprint
        return "tokenizer_fingerprint" if ours and theirs and ours != theirs else None

    def _end(self, key: WorkerKey) -> None:
        self._over[key] = None
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
        if self.get(key) is not None:
            self._log.info("worker left", worker_id=key.worker_id)
            self._forget(key)

    def _forget(self, key: WorkerKey) -> None:
        del self._members[key.worker_id]
        self._count()
        for listener in self._on_gone:
            listener(key)

    def _count(self) -> None:
        for role in Role:
            MEMBERS.labels(role.value).set(len(self.workers(role)))
