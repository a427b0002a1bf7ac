"""Servers side by side, one of them in play.

1. Each is started alone, while those before it idle, and timed until its first token.
2. Then what it computes while idle is measured. One that spins is frozen, and thawed only for its turns.
3. However the block is left, all are ended.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import report
from bench.peer.measures import Asker, Sizes
from bench.peer.server import NotRunError, Server, idle_share
from bench.peer.window import NotComparableError

SPINS = 0.05  # of a core
SETTLE_S, WATCH_S = 1.0, 3.0
THAW_S = 0.3


@dataclass(slots=True)
class Place:
    """A server that runs."""

    server: Server
    asker: Asker
    start_s: float  # from the start of its first process to the first token of a first request
    idle_share: float  # of a core
    spins: bool


class Rack:
    """A context manager: leaves no process behind."""

    def __init__(self, logs: Path, sizes: Sizes) -> None:
        self.places: dict[str, Place] = {}
        self._logs, self._sizes = logs, sizes
        self._stack = ExitStack()

    def __enter__(self) -> "Rack":
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not leave half of them running
        report.progress("ending all servers")
        self._stack.close()
        report.progress("")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def add(self, key: str, server: Server) -> None:
        """Start a server, time it, watch it idle. Raises NotRunError."""
        self._stack.callback(server.stop)
        report.progress(f"starting {server.name}")
        started_s = time.perf_counter()
        try:
            base_url = server.start(self._logs / f"{key}.log")
            asker = Asker(base_url, server.wants, self._sizes)
            start_s = asker.first_token_s() - started_s
        except NotComparableError as error:
            server.stop()
            raise NotRunError(f"its first answer: {error}") from error
        except NotRunError:
            server.stop()
            raise
        report.progress(f"{server.name} idles")
        time.sleep(SETTLE_S)
        share = idle_share(server, WATCH_S)
        place = Place(server, asker, start_s, share, spins=share > SPINS)
        if place.spins:
            server.pause()
        self.places[key] = place

    @contextmanager
    def play(self, key: str) -> Iterator[Asker]:
        """The server's turn."""
        place = self.places[key]
        if place.spins:
            place.server.resume()
            time.sleep(THAW_S)
        try:
            yield place.asker
        finally:
            if place.spins:
                place.server.pause()
