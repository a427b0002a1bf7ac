"""The one way into the engine thread: other threads post, the engine drains between two steps."""

import threading
from collections import deque


class Inbox:
    """An unbounded queue of messages with many posters and one reader. What bounds it is admission at the edges."""

    def __init__(self) -> None:
        self._messages: deque[object] = deque()  # append and popleft are atomic
        self._posted = threading.Event()

    def __len__(self) -> int:
        """Messages posted and not drained."""
        return len(self._messages)

    def post(self, message: object) -> None:
        """Leave a message, from any thread; wakes the reader, never blocks."""
        self._messages.append(message)
        self._posted.set()

    def drain(self) -> list[object]:
        """Everything posted so far, in order; at once, also when that is nothing."""
        self._posted.clear()  # before taking: a message posted from here on wakes the next wait
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until a message is there or the time is over (None: no limit); says whether one is there."""
        return self._posted.wait(timeout_s)
