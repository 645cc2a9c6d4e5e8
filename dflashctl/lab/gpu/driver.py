"""The driver process of the simulated GPUs: the analogue of the kernel driver, one on each lab host.

    python -m dflashctl.lab.gpu.driver GPU_DIR

It must run in the pid namespace whose pids count as "the host's" and see the device files of GPU_DIR. It
serves until SIGTERM, keeps no state but what lingers, and reads state.json anew for each request."""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from dflashctl.lab.gpu import holders as who
from dflashctl.lab.gpu.fields import View
from dflashctl.lab.gpu.smi import Answer, answer, needs_utilization
from dflashctl.lab.gpu.state import Box, load

_REPLY_S = 5.0
_HANG_S = 3600.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Call:
    """A request as its client wrote it down."""

    argv: tuple[str, ...]
    nodes: dict[str, str]
    """Device files that the caller can open: name -> "device:inode"."""
    pidns: str


def read_call(folder: Path) -> Call:
    """Read a call's folder. Its files belong to a stranger, so no link is followed."""

    def text(name: str) -> bytes:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as f:
            return f.read(1 << 20)

    argv = tuple(os.fsdecode(a) for a in text("argv").split(b"\0")[:-1])
    nodes = dict(line.split(" ", 1) for line in os.fsdecode(text("nodes")).splitlines() if " " in line)
    return Call(argv, nodes, os.fsdecode(text("pidns")).strip())


class Driver:
    """Answers calls; thread-safe. `gpu_dir` as setup.py lays it out."""

    def __init__(self, gpu_dir: Path) -> None:
        self.gpu_dir = gpu_dir
        self.dev = gpu_dir / "dev"
        self.calls = gpu_dir / "rpc" / "calls"
        self.stopping = threading.Event()
        self._pidns = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
        self._lingering = who.Lingering()
        self._lock = threading.Lock()

    def _ids(self, name: str) -> str:
        s = (self.dev / name).stat()
        return f"{s.st_dev}:{s.st_ino}"

    def _look(self, box: Box) -> tuple[list[who.Holder], dict[int, int]]:
        with self._lock:
            found = who.scan(self.dev, box.default_mib, frozenset({os.getpid()}))
            return found, self._lingering.update(found, box.linger_s, time.monotonic())

    def answer(self, call: Call) -> Answer:
        """What this caller is told now."""
        box = load(self.gpu_dir)
        if box.answer_delay_s:
            self.stopping.wait(box.answer_delay_s)
        inside = call.pidns != self._pidns
        if (box.mode_at == "host" and inside) or (box.mode_at == "container" and not inside):
            box.mode = "ok"
        if box.mode == "ok" and call.nodes.get("nvidiactl") != self._ids("nvidiactl"):
            box.mode = "blocked"
        seen = tuple(
            g
            for g in box.gpus
            if g.fault != "missing" and call.nodes.get(f"nvidia{g.index}") == self._ids(f"nvidia{g.index}")
        )
        holders, lingering = self._look(box)
        busy = who.utilization(holders) if needs_utilization(call.argv) and box.mode == "ok" else {}
        numbers = {g.uuid: n for n, g in enumerate(seen)}
        listed = () if inside and box.container_apps == "hidden" else tuple(holders)
        return answer(call.argv, View(box, seen, numbers, tuple(holders), listed, lingering, busy))

    def _reply(self, folder: Path, reply: Answer) -> None:
        path = folder / "answer"
        deadline = time.monotonic() + _REPLY_S
        while True:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                break
            except OSError:  # ENXIO: the client has not opened its end yet; or it is gone
                if time.monotonic() > deadline or not folder.exists():
                    return
                time.sleep(0.002)
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return
            data = b"hang\n" if reply.hang else f"{reply.code}\n".encode() + os.fsencode(reply.text)
            while data and time.monotonic() < deadline:
                if select.select([], [fd], [], 0.1)[1]:
                    data = data[os.write(fd, data) :]
            if reply.hang:
                self._hold(fd)
        except OSError:
            pass  # the client went away
        finally:
            os.close(fd)

    def _hold(self, fd: int) -> None:
        """Keep a hanging client waiting until it goes, or we do."""
        poll, end, alone_since = select.poll(), time.monotonic() + _HANG_S, None
        poll.register(fd, 0)
        while time.monotonic() < end and not self.stopping.wait(0.1):
            if not poll.poll(0):
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > 2:
                return

    def serve_call(self, name: str) -> None:
        """One announced call, from folder to answer; never raises."""
        folder = self.calls / name
        if name.startswith(".") or "/" in name or not folder.is_dir() or folder.is_symlink():
            return
        try:
            try:
                reply = self.answer(read_call(folder))
            except (OSError, ValueError, KeyError, TypeError) as error:
                reply = Answer(95, f"nvidia-smi (simulated): {type(error).__name__}: {error}\n")
            self._reply(folder, reply)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def watch_ends(self) -> None:
        """While memory lingers after a death, notice deaths as they happen, not at the next question."""
        while not self.stopping.wait(_POLL_S):
            try:
                box = load(self.gpu_dir)
            except (OSError, ValueError):
                continue
            if box.linger_s > 0:
                self._look(box)

    def serve(self) -> None:
        """Read the control fifo until `stopping` is set."""
        # Opened for writing as well, so that it never reports end of file between two clients.
        control = os.open(self.gpu_dir / "rpc" / "control", os.O_RDWR | os.O_NONBLOCK)
        threading.Thread(target=self.watch_ends, daemon=True).start()
        buffer = b""
        try:
            while not self.stopping.is_set():
                if not select.select([control], [], [], 0.1)[0]:
                    continue
                buffer += os.read(control, 65536)
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    threading.Thread(target=self.serve_call, args=(os.fsdecode(line),), daemon=True).start()
        finally:
            os.close(control)


def serve(gpu_dir: Path) -> None:
    """Serve the box in gpu_dir until SIGTERM or SIGINT (main thread only)."""
    driver = Driver(gpu_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: driver.stopping.set())
    driver.serve()


if __name__ == "__main__":
    serve(Path(sys.argv[1]).absolute())
