"""The puller's conversation with one life of one holder. Lives on the event loop.

The life of a link:

1. first contact: Hello compares layouts, then the transport connects; made once, and again when the path was lost;
2. `begin` a handoff: its lease is renewed at once and then each second, with all others of the link, and the one Follow
   stream tells its progress; a broken stream is opened anew for a second, then its handoffs fail;
3. `release` asks the holder whether the lease held, repeating the question while it goes unanswered;
4. a holder that refuses, is gone, or answers no renewal for a lease's time fails all handoffs of the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from services.kvtransfer.feed import HandoffState, Progress
from services.kvtransfer.holder_stub import FollowWish, HolderStub, LinkError, LinkLimits
from services.kvtransfer.messages import HandoffComplete, HandoffFailed, HandoffReady, Released
from services.kvtransfer.transport import Endpoint, PeerRef, TransportError

REOPEN_S = 0.1  # between a broken Follow stream and the next


@dataclass(slots=True)
class _Followed:
    """`seen`: indices announced so far, so that a stream opened anew repeats nothing."""

    seen: set[int] = field(default_factory=set)
    complete: bool = False
    releasing: bool = False


class PeerLink:
    """All handoffs from one holder."""

    def __init__(
        self,
        peer: PeerRef,
        me: Callable[[], Endpoint],
        connect: Callable[[Endpoint], Awaitable[None]],
        post: Callable[[object], None],
        limits: LinkLimits,
    ) -> None:
        self.peer = peer
        self._connect = connect
        self._post = post
        self._limits = limits
        self._holder = HolderStub(peer, me, limits)
        self._handoffs: dict[str, _Followed] = {}
        self._wishes: asyncio.Queue[FollowWish] = asyncio.Queue()
        self._renew_s = limits.renew_s
        self._renew_now = asyncio.Event()
        self._contact: asyncio.Task[None] | None = None
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """True where no handoff is under way."""
        return not self._handoffs and not self._tasks

    # What the puller asks for.

    def contact(self, *, anew: bool = False) -> asyncio.Task[None]:
        """The first contact, under way or made; `anew` where the data path was lost since. Raises LinkError."""
        task = self._contact
        if task is None or (task.done() and (anew or task.cancelled() or task.exception() is not None)):
            self._contact = task = asyncio.create_task(self._hello())
        return task

    def begin(self, handoff_id: str) -> None:
        """Follows a handoff and keeps its lease."""
        self._handoffs[handoff_id] = _Followed()
        self._renew_now.set()
        self._ensure("renew", self._renew)
        self._spawn(self._begin(handoff_id))

    def release(self, handoff_id: str, corrupt_indices: tuple[int, ...]) -> None:
        """Ends a handoff whose blocks are here; Released will be posted."""
        if handoff := self._handoffs.get(handoff_id):
            handoff.releasing = True
        self._spawn(self._release(handoff_id, corrupt_indices))

    def cancel(self, handoff_id: str) -> None:
        """Ends a handoff that nobody wants any more; the holder is told, as far as it can be reached."""
        self._end(handoff_id)
        self._spawn(self._cancel(handoff_id))

    async def close(self, reason: str) -> None:
        """Fails what is left and hangs up."""
        self._fail_all(reason)
        tasks = [*self._tasks, *self._loops.values(), *([self._contact] if self._contact else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._holder.close()

    # First contact.

    async def _hello(self) -> None:
        endpoint = await self._holder.hello()
        try:
            await self._connect(endpoint)
        except TransportError as error:
            raise LinkError(str(error)) from error

    async def _begin(self, handoff_id: str) -> None:
        try:
            await asyncio.shield(self.contact())
        except LinkError as error:
            self._fail(handoff_id, str(error))
            return
        if handoff_id in self._handoffs and not self._ensure("follow", self._follow):
            self._wishes.put_nowait(FollowWish(handoff_id))

    # The two loops: progress comes in, renewals go out, while there are handoffs.

    async def _follow(self) -> None:
        broken_s: float | None = None
        now = asyncio.get_running_loop().time
        while True:
            self._wishes = asyncio.Queue()
            for handoff_id in self._handoffs:
                self._wishes.put_nowait(FollowWish(handoff_id))
            reason = LinkError("the holder ended the stream")
            try:
                async for progress, lease_s in self._holder.follow(self._wishes):
                    broken_s = None
                    self._keep_pace(lease_s)
                    self._progress(progress)
            except LinkError as error:
                reason = error
            broken_s = now() if broken_s is None else broken_s
            if reason.refused or now() - broken_s > self._limits.refollow_s:
                self._fail_all(str(reason))
            if not self._handoffs:
                return
            await asyncio.sleep(REOPEN_S)

    def _keep_pace(self, lease_s: float) -> None:
        """Renews faster where the holder's leases are short."""
        if 0 < lease_s < 3 * self._renew_s:
            self._renew_s = lease_s / 3
            self._renew_now.set()

    def _progress(self, progress: Progress) -> None:
        handoff = self._handoffs.get(progress.handoff_id)
        if handoff is None:
            return
        fresh = tuple(block for block in progress.blocks if block.index not in handoff.seen)
        if fresh:
            handoff.seen.update(block.index for block in fresh)
            self._post(HandoffReady(progress.handoff_id, progress.num_tokens, progress.num_blocks, fresh))
        if progress.first_token is not None and not handoff.complete:
            handoff.complete = True
            self._post(HandoffComplete(progress.handoff_id, progress.first_token))
        if progress.state in (HandoffState.FAILED, HandoffState.UNKNOWN) and not handoff.releasing:
            self._fail(progress.handoff_id, progress.reason)

    async def _renew(self) -> None:
        now = asyncio.get_running_loop().time
        answered_s = now()
        while self._handoffs:
            self._renew_now.clear()
            try:
                over = await self._holder.renew(list(self._handoffs))
                answered_s = now()
                for handoff_id in over:
                    if (handoff := self._handoffs.get(handoff_id)) and not handoff.releasing:
                        self._fail(handoff_id, "the lease is over")
            except LinkError as error:
                if error.refused:
                    self._fail_all(str(error))
                elif now() - answered_s > self._limits.silence_s:
                    self._fail_all("the holder answers no renewal")
            await _wait(self._renew_now, self._renew_s)

    # Endings.

    async def _release(self, handoff_id: str, corrupt_indices: tuple[int, ...]) -> None:
        answer = await self._holder.release(handoff_id, corrupt_indices)
        self._end(handoff_id)
        self._post(Released(handoff_id, answer.held, answer.since_complete_s))

    async def _cancel(self, handoff_id: str) -> None:
        await self._holder.release(handoff_id)

    def _fail_all(self, reason: str) -> None:
        for handoff_id, handoff in list(self._handoffs.items()):
            if not handoff.releasing:  # its release asks, and answers, for itself
                self._fail(handoff_id, reason)

    def _fail(self, handoff_id: str, reason: str) -> None:
        if handoff_id in self._handoffs:
            self._end(handoff_id)
            self._post(HandoffFailed(handoff_id, f"{self.peer.worker_id}: {reason}"))

    def _end(self, handoff_id: str) -> None:
        if self._handoffs.pop(handoff_id, None) is not None:
            self._wishes.put_nowait(FollowWish(handoff_id, stop=True))

    def _ensure(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """True where the loop did not run and was started."""
        task = self._loops.get(name)
        if task is not None and not task.done():
            return False
        self._loops[name] = asyncio.create_task(loop())
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
