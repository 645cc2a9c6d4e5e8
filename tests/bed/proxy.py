"""A TCP proxy on loopback that harms a connection on purpose, at a chosen byte or moment.

    with Proxy(port_of_sshd) as proxy:
        proxy.cut_after(5000, "up")      # end the connection after 5,000 bytes from the client
        ...                              # connect to proxy.port

"up" is from client to server, "down" from server to client. A *cut* is a reset, as when a peer reboots; a
*stall* moves no more bytes and closes nothing, as when a cable is pulled; a *throttle* and a *delay* are a
bad line. Rules may be set before or during a connection; byte counts are per connection."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]
BOTH: tuple[Direction, Direction] = ("up", "down")
_CHUNK = 16384
_TICK_S = 0.05


@dataclass
class Rules:
    """What happens to one direction. Byte positions count from the connection's start; None: never."""

    cut_at: int | None = None
    stall_at: int | None = None
    bytes_per_s: float | None = None
    delay_s: float = 0.0


@dataclass
class Connection:
    """One client and the server connection made for it; `moved` counts bytes handed on."""

    client: socket.socket
    server: socket.socket
    moved: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    finished: set[Direction] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    def finish(self, direction: Direction, sink: socket.socket) -> None:
        """Pass on the orderly end of one direction; after that of both, the connection has ended."""
        if self.ended.is_set():
            return
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self.finished.add(direction)
        if len(self.finished) == 2:
            self.ended.set()
            self.client.close()
            self.server.close()

    def reset(self) -> None:
        """End both sides at once; the peers read a reset."""
        self.ended.set()
        for s in (self.client, self.server):
            with contextlib.suppress(OSError):
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()


class Proxy:
    """Listens on 127.0.0.1:`port` and forwards to 127.0.0.1:target_port."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.rules: dict[Direction, Rules] = {"up": Rules(), "down": Rules()}
        self.connections: list[Connection] = []
        self.refusing = False
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._spawn(self._accept)

    # --- what a test says ---

    def cut_after(self, count: int, direction: Direction = "up") -> None:
        """Reset each connection when `count` bytes have passed in this direction."""
        self.rules[direction].cut_at = count

    def cut(self) -> int:
        """Reset all connections now; returns how many there were."""
        live = [c for c in self.connections if not c.ended.is_set()]
        for connection in live:
            connection.reset()
        return len(live)

    def stall_after(self, count: int, direction: Direction = "up") -> None:
        """Move nothing more in this direction after `count` bytes."""
        self.rules[direction].stall_at = count

    def stall(self) -> None:
        """Move nothing more, in either direction, from now on."""
        for direction in BOTH:
            self.rules[direction].stall_at = 0

    def resume(self) -> None:
        """Lift stalls."""
        for direction in BOTH:
            self.rules[direction].stall_at = None

    def throttle(self, bytes_per_s: float | None) -> None:
        """At most this rate in each direction; None lifts it."""
        for direction in BOTH:
            self.rules[direction].bytes_per_s = bytes_per_s

    def delay(self, seconds: float) -> None:
        """Hold each piece for this long, in each direction: a round trip takes twice as much more."""
        for direction in BOTH:
            self.rules[direction].delay_s = seconds

    def refuse(self) -> None:
        """Take no new connections: accepted and reset at once, before a byte."""
        self.refusing = True

    @property
    def live(self) -> int:
        """Connections that are open now."""
        return sum(not c.ended.is_set() for c in self.connections)

    def moved(self, direction: Direction) -> int:
        """Bytes handed on in this direction, all connections together."""
        return sum(c.moved[direction] for c in self.connections)

    # --- how it works ---

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            if not select.select([self._listener], [], [], _TICK_S)[0]:
                continue
            client, _ = self._listener.accept()
            if self.refusing:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port), 5)
            except OSError:
                client.close()
                continue
            connection = Connection(client, server)
            self.connections.append(connection)
            self._spawn(self._pump, connection, "up", client, server)
            self._spawn(self._pump, connection, "down", server, client)

    def _pump(self, c: Connection, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        rules = self.rules[direction]
        try:
            while not self._over.is_set() and not c.ended.is_set():
                done = c.moved[direction]
                if rules.cut_at is not None and done >= rules.cut_at:
                    c.reset()
                    return
                if rules.stall_at is not None and done >= rules.stall_at:
                    c.ended.wait(_TICK_S)
                    continue
                if not select.select([source], [], [], _TICK_S)[0]:
                    continue
                stops = [at - done for at in (rules.cut_at, rules.stall_at) if at is not None]
                room = min([_CHUNK, *(s for s in stops if s > 0)])
                if rules.bytes_per_s is not None:
                    room = min(room, max(1, int(rules.bytes_per_s * _TICK_S)))
                if rules.stall_at is not None and done >= rules.stall_at:
                    continue  # stalled while we waited for bytes
                data = source.recv(room)
                if not data:
                    c.finish(direction, sink)
                    return
                if rules.delay_s:
                    c.ended.wait(rules.delay_s)
                if rules.bytes_per_s is not None:
                    c.ended.wait(len(data) / rules.bytes_per_s)
                sink.sendall(data)
                c.moved[direction] += len(data)
        except (OSError, ValueError):
            c.reset()

    def close(self) -> None:
        """End all connections and wait for the threads."""
        self._over.set()
        self.cut()
        for c in self.connections:
            c.reset()
        end = time.monotonic() + 5
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
