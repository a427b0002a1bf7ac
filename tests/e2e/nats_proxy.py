"""A NATS proxy that understands frames: it drops, repeats and reorders messages on token subjects, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Mischief:
    """Shares of token messages; counts of what was done."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: {"drop": 0, "repeat": 0, "reorder": 0})


class NatsProxy:
    """Between clients and a nats-server on loopback. Frames from server to client are the ones tampered with."""

    def __init__(self, upstream_port: int, mischief: Mischief, seed: int = 0) -> None:
        self._upstream_port = upstream_port
        self._mischief = mischief
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream_port))
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._copy, args=(client, server), daemon=True).start()
            threading.Thread(target=self._tamper, args=(server, client), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _tamper(self, source: socket.socket, sink: socket.socket) -> None:
        stream = source.makefile("rb")
        held: bytes | None = None
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline():
                frame = line
                if line.startswith(b"MSG "):
                    frame += stream.read(int(line.split()[-1]) + 2)
                if not line.startswith(b"MSG pdserve.tokens."):
                    sink.sendall(frame)
                    continue
                frames, held = self._choose(frame, held)
                sink.sendall(b"".join(frames))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _choose(self, frame: bytes, held: bytes | None) -> tuple[list[bytes], bytes | None]:
        """What to send now, and what to hold back until after the next frame."""
        mischief, roll = self._mischief, self._random.random()
        if roll < mischief.drop:
            mischief.counts["drop"] += 1
            return [held] if held else [], None
        if roll < mischief.drop + mischief.repeat:
            mischief.counts["repeat"] += 1
            return [frame, frame, *([held] if held else [])], None
        if roll < mischief.drop + mischief.repeat + mischief.reorder and held is None:
            mischief.counts["reorder"] += 1
            return [], frame
        return [frame, *([held] if held else [])], None
