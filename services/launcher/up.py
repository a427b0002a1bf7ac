"""`pdserve up`: everything on this machine until Ctrl-C.

1. NATS, the directory, both pools and the gateway start, each seen ready.
2. Their lines are printed; what dies is started again.
3. Ctrl-C or SIGTERM drains and ends all; a second one ends all at once.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

from services.launcher.deployment import Deployment
from services.launcher.terminal import StartProgress, start_progress

INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells have it


def run(make: Callable[[StartProgress], Deployment], model: str, console: Console) -> None:
    """Runs what `make` makes until a signal asks for its end. Raises StartError."""
    with started(make, console) as house:
        console.rule("pdserve is up")
        console.print(_how_to_call(house, model), soft_wrap=True, markup=False)
        console.rule()
        while True:
            signal.pause()


@contextlib.contextmanager
def started(make: Callable[[StartProgress], Deployment], console: Console) -> Iterator[Deployment]:
    """A running deployment. A first signal leaves the block, quietly; a second one, while all ends, kills.

    Raises StartError; SystemExit where the signal comes while it starts.
    """
    houses: list[Deployment] = []
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt
        for house in houses:
            house.abandon()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    try:
        try:
            with start_progress(console) as progress:
                house = make(progress)
                houses.append(house)
                progress.expect(list(house.members))
                house.start()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None  # there is no block to leave
        with contextlib.suppress(KeyboardInterrupt):
            yield house
    finally:
        for house in houses:
            house.close()


def _how_to_call(house: Deployment, model: str) -> str:
    url = house.gateway_url
    asked = f'"model": "{model}", "stream": true, "temperature": 0, "max_tokens": 64'
    body = f'{{{asked}, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    command = sys.argv[0] if sys.argv[0].endswith("pdserve") else "pdserve"  # as it was called
    lines = [
        f"API       {url}/v1",
        f"try       {command} chat --url {url}",
        f"or        curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        *(f"{worker.name:<9} {worker.admin_url}/metrics" for worker in house.workers),
        "end       Ctrl-C",
    ]
    return "\n".join(lines)
