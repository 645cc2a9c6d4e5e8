"""How target and drafter processes speak of slots: one connection for each pair, over Unix sockets.

Unit (n, d) is the rows of step n that drafter d works on. Target (n D + d) mod T makes it and writes it into
slot n mod K of that drafter, once the drafter has said that step n - K is taken. So nobody asks who is next,
a target never overruns a drafter, and a process that dies is noticed at once: its connections end.

    drafter -> target   ("slots", ticket)                            ("taken", n)  ("end",)
    target -> drafter   ("open", bytes a second, checksum of a test) ("filled", n, bad rows, checksum)
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trainer.topology.ranks import PeerLost
from trainer.writing import write_json

POLL_S = 0.2


def maker(number: int, drafter: int, drafters: int, targets: int) -> int:
    """Which target makes unit (number, drafter)."""
    return (number * drafters + drafter) % targets


class Door:
    """Where a drafter waits for the targets: a socket in a folder that only this account can enter. Its path
    is in a file of the run, where the targets look for it.
    """

    def __init__(self, note: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dflash-"))  # sockets' paths must be short
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._folder / "s"))
        self._socket.listen(64)
        self._socket.settimeout(POLL_S)
        write_json(note, {"socket": str(self._folder / "s")})

    def accept(self, count: int, beat: Callable[[], None], wait_s: float) -> list[Connection]:
        """One connection from each target, in the order of targets; then the door is gone.

        Raises:
            PeerLost: one does not come.
        """
        found: dict[int, Connection] = {}
        end = time.monotonic() + wait_s
        try:
            while len(found) < count:
                beat()
                try:
                    accepted, _ = self._socket.accept()
                except TimeoutError:
                    if time.monotonic() > end:
                        missing = sorted(set(range(count)) - set(found))
                        raise PeerLost(f"targets {missing} did not come within {wait_s:.0f} s") from None
                    continue
                accepted.setblocking(True)
                connection = Connection(accepted.detach())
                found[connection.recv()] = connection
        finally:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return [found[index] for index in range(count)]


def knock(note: Path, target: int, beat: Callable[[], None], wait_s: float) -> Connection:
    """A target's connection to the drafter that wrote `note`. Raises PeerLost: it opens no door."""
    end = time.monotonic() + wait_s
    while True:
        beat()
        with suppress(OSError, ValueError, KeyError):
            path = json.loads(note.read_text())["socket"]
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.connect(path)
            connection = Connection(plain.detach())
            connection.send(target)
            return connection
        if time.monotonic() > end:
            raise PeerLost(f"no drafter behind {note} within {wait_s:.0f} s")
        time.sleep(POLL_S)


class Line:
    """Connections to all peers of the other role: what they say, waited for with beats and deadlines."""

    def __init__(self, peers: list[Connection], name: str, beat: Callable[[], None]) -> None:
        """name: of a peer's role, for messages."""
        self.peers, self._name, self._beat = peers, name, beat
        self._ended: set[int] = set()

    def tell(self, peer: int, *message: Any) -> None:
        """Raises PeerLost: it is gone, and has not said that it ends."""
        try:
            self.peers[peer].send(message)
        except OSError as error:
            if not self._has_ended(peer):
                raise PeerLost(f"{self._name} {peer} is gone: {error.strerror}") from error

    def _has_ended(self, peer: int) -> bool:
        """Whether ("end",) is among what it said last: one that ends goes while others still work ahead."""
        with suppress(EOFError, OSError):
            while peer not in self._ended:
                if self.peers[peer].recv() == ("end",):
                    self._ended.add(peer)
        return peer in self._ended

    def tell_all(self, *message: Any) -> None:
        for peer in range(len(self.peers)):
            self.tell(peer, *message)

    @property
    def all_ended(self) -> bool:
        """Whether every peer has said ("end",)."""
        return len(self._ended) == len(self.peers)

    def hear(
        self,
        on_message: Callable[[int, tuple[Any, ...]], None],
        until: Callable[[], bool],
        wait_s: float,
        what: str,
    ) -> None:
        """Take what the peers say, one message after the other, until `until()` holds.

        Args:
            what: is awaited, for messages.
        Raises:
            PeerLost: a peer is gone that has not said that it ends; or nothing was heard for `wait_s`.
        """
        end = time.monotonic() + wait_s
        while not until():
            open_ones = [peer for peer in range(len(self.peers)) if peer not in self._ended]
            ready = wait([self.peers[peer] for peer in open_ones], timeout=POLL_S)
            self._beat()
            for peer in open_ones:
                if self.peers[peer] not in ready:
                    continue
                try:
                    message = self.peers[peer].recv()
                except (EOFError, OSError) as error:
                    raise PeerLost(f"{what}: {self._name} {peer} is gone") from error
                if message == ("end",):
                    self._ended.add(peer)
                else:
                    on_message(peer, message)
            if not ready and time.monotonic() > end:
                raise PeerLost(
                    f"{what}: nothing from the {self._name}s for {wait_s:.0f} s",
                    next="dflashctl stacks TAG shows where they are; train.layout.wait_s is the deadline",
                )

    def close(self) -> None:
        for connection in self.peers:
            connection.close()
