"""Stop strings across chunk borders.

The outcome depends on the text alone, not on how it was cut into chunks: the text ends before the stop string whose
last character comes first; of several that end there, before the longest. Text that may yet become a stop string is
held back. One Knuth-Morris-Pratt automaton per stop string, so the cost is constant per character and stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty strings."""
        self._patterns = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(self._patterns)  # characters of each stop string matched so far
        self._held = ""  # the longest tail of the text that begins a stop string
        self.stopped = False

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """The text that is now certain to be output. Empty for ever once `stopped`."""
        if self.stopped or not self._patterns:
            return "" if self.stopped else text
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            matched = self._advance(buffer[end - 1])
            if matched:
                self.stopped, self._held = True, ""
                return buffer[: end - matched]
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Moves every automaton on; the length of the longest stop string that ends here, or 0."""
        matched = 0
        for i, (stop, table) in enumerate(self._patterns):
            state = self._states[i]
            while state and stop[state] != character:
                state = table[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                matched = max(matched, state)
                state = table[state - 1]
            self._states[i] = state
        return matched


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
