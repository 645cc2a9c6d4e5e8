"""The two kinds of containers behind one interface: real LXC, and plain namespaces."""

from __future__ import annotations

import os

from dflashctl.lab.pct import attach, freezer, namespaces
from dflashctl.lab.pct.errors import Die

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflashctl.lab.pct.state import State

STOP_DEADLINE_S = 30.0


class Backend:
    """One container. `init_pid` is its first process as the caller's pid namespace counts it."""

    def __init__(self, state: State, vmid: int) -> None:
        self.state = state
        self.vmid = vmid

    def running(self) -> bool:
        """True while the container runs, also when it is frozen."""
        raise NotImplementedError

    def init_pid(self) -> int:
        """The first process's pid. Die when there is none."""
        raise NotImplementedError

    def attach(
        self, argv: Sequence[bytes], env: Mapping[bytes, bytes], configured: Sequence[bytes], *, keep: bool
    ) -> int:
        """Run argv inside and return its exit code; does not return at all when another program takes
        over."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it. Die with the reason."""
        raise NotImplementedError

    def stop(self, timeout_s: float | None, *, force: bool) -> bool:
        """Ask it to end and wait timeout_s; then kill it if `force`. With None kill it at once. Returns
        whether it is gone."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Stop every process in it without ending any; later ones wait too."""
        raise NotImplementedError

    def thaw(self) -> None:
        raise NotImplementedError


class Userns(Backend):
    """A container made by dflashctl.lab.container: user, mount, pid, uts and ipc namespaces, without root."""

    def _alive(self) -> int | None:
        try:
            with open(os.path.join(self.state.folder, "ns", f"{self.vmid}.init"), encoding="ascii") as file:
                pid, ticks = (int(part) for part in file.read().split())
        except (OSError, ValueError):
            return None
        return pid if namespaces.start_ticks(pid) == ticks else None

    def running(self) -> bool:
        return self._alive() is not None

    def init_pid(self) -> int:
        pid = self._alive()
        if pid is None:
            raise Die(f"unable to get PID for CT {self.vmid} (not running?)\n")
        return pid

    def attach(
        self, argv: Sequence[bytes], env: Mapping[bytes, bytes], configured: Sequence[bytes], *, keep: bool
    ) -> int:
        inside = attach.environment(env, configured, keep=keep)
        pid = self._alive() or 0
        held = freezer.hold if freezer.is_frozen(self.state.folder, self.vmid) else None
        return attach.run(self.vmid, pid, argv, inside, held)

    def start(self) -> None:
        from dflashctl.lab import container

        freezer.forget(self.state.folder, self.vmid)
        try:
            container.start(self.state.folder, self.vmid)
        except container.ContainerError as error:
            raise Die(f"{error}\n") from None

    def stop(self, timeout_s: float | None, *, force: bool) -> bool:
        from dflashctl.lab import container

        if timeout_s is None:
            timeout_s, force = 0.0, True
        try:
            gone = container.stop(self.state.folder, self.vmid, timeout_s, force=force)
        except container.ContainerError as error:
            raise Die(f"{error}\n") from None
        if gone:
            freezer.forget(self.state.folder, self.vmid)
        return gone

    def freeze(self) -> None:
        freezer.freeze(self.state.folder, self.vmid, self.init_pid())

    def thaw(self) -> None:
        freezer.thaw(self.state.folder, self.vmid, self.init_pid())


class Lxc(Backend):
    """A container of LXC's, by LXC's own programs."""

    def __init__(self, state: State, vmid: int, lxcpath: str) -> None:
        super().__init__(state, vmid)
        self.lxcpath = lxcpath

    def _program(self, name: str, *args: str) -> list[str]:
        return [name, "-P", self.lxcpath, "-n", str(self.vmid), *args]

    def running(self) -> bool:
        wanted = command_socket(self.lxcpath, str(self.vmid))
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            return any(line.rstrip("\n").endswith(wanted) for line in file)

    def init_pid(self) -> int:
        done = _capture(self._program("lxc-info", "-p"))
        for line in done.splitlines():
            if line.startswith("PID:"):
                return int(line[4:])
        raise Die(f"unable to get PID for CT {self.vmid} (not running?)\n")

    def attach(
        self, argv: Sequence[bytes], env: Mapping[bytes, bytes], configured: Sequence[bytes], *, keep: bool
    ) -> int:
        # lxc-attach adds the container's configured variables itself.
        flag = "--keep-env" if keep else "--clear-env"
        command = [os.fsencode(word) for word in self._program("lxc-attach", flag, "--")] + list(argv)
        try:
            os.execvpe(b"lxc-attach", command, dict(env))
        except OSError as error:
            raise Die(f"pct stand-in: cannot run lxc-attach: {error.strerror}\n") from None

    def start(self) -> None:
        code = _call(self._program("lxc-start"))
        if code != 0:
            raise Die(f"startup for container '{self.vmid}' failed\n")

    def stop(self, timeout_s: float | None, *, force: bool) -> bool:
        if timeout_s is None:
            command = self._program("lxc-stop", "--kill")
        else:
            command = self._program(
                "lxc-stop", *([] if force else ["--nokill"]), "--timeout", f"{timeout_s:.0f}"
            )
        _call(command, ignore_failure=True)
        return not self.running()

    def freeze(self) -> None:
        _call(self._program("lxc-freeze"))

    def thaw(self) -> None:
        _call(self._program("lxc-unfreeze"))


def backend(state: State, vmid: int) -> Backend:
    """The container's backend, by its ns/<vmid>.json."""
    settings = state.backend_settings(vmid)
    kind = settings.get("backend")
    if kind == "userns":
        return Userns(state, vmid)
    if kind == "lxc":
        return Lxc(state, vmid, str(settings.get("lxcpath") or "/var/lib/lxc"))
    raise Die(f"pct stand-in: CT {vmid} has backend {kind!r}, known are userns and lxc\n")


def command_socket(lxcpath: str, name: str) -> str:
    """LXC's abstract command socket as /proc/net/unix shows it. A long path is replaced by its FNV-1a hash,
    as lxc_make_abstract_socket_name does."""
    plain = f"{lxcpath}/{name}/command"
    if len(os.fsencode(plain)) < 106:  # sizeof(sun_path) minus the leading NUL and what LXC keeps free
        return f" @{plain}"
    value = 0xCBF29CE484222325
    for byte in os.fsencode(f"{lxcpath}/{name}"):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f" @lxc/{value:016x}/command"


def _capture(command: Sequence[str]) -> str:
    import subprocess

    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=False).stdout


def _call(command: Sequence[str], *, ignore_failure: bool = False) -> int:
    import subprocess

    code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=600, check=False).returncode
    return 0 if ignore_failure else code
