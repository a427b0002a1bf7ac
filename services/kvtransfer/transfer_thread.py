"""The one thread that talks to the transport and takes checksums.

Jobs run in the order they were submitted. Between them the thread polls what is in flight, as often as that asks for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.runtime import log

T = TypeVar("T")
Job = Callable[[], None]


class TransferThread:
    """Runs jobs, and `poll` between them. `poll()` returns the seconds until it wants to run again, None for never."""

    def __init__(self, poll: Callable[[], float | None], on_crash: Callable[[str], None]) -> None:
        self._poll = poll
        self._on_crash = on_crash
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        """Begins to work off what was submitted."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Runs `job` on the thread, after those submitted before. Any thread may call."""
        self._jobs.put(job)

    def wake(self) -> None:
        """Makes the thread poll soon."""
        self._jobs.put(_nothing)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Runs `question` on the thread; what it returns or raises comes with the future."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question())
            except Exception as error:  # noqa: BLE001 - carried to whoever asked
                future.set_exception(error)

        self.submit(job)
        return future

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the jobs submitted so far; idempotent."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the edge of the thread
            log.get_logger().exception("the transfer thread died")
            self._on_crash(repr(error))

    def _turn(self) -> bool:
        """Poll once, wait for a job as long as nothing is due, work off the queue. False: stop."""
        try:
            job = self._jobs.get(timeout=self._poll())
            while True:
                if job is None:
                    return False
                job()
                job = self._jobs.get_nowait()
        except queue.Empty:
            return True


def _nothing() -> None:
    """A job that only wakes the thread."""
