"""start, stop, shutdown, reboot, suspend and resume (docs/pct.md#power). All but the first checks run in a
worker."""

from __future__ import annotations

from dflashctl.lab.pct import config, lock, worker
from dflashctl.lab.pct.backends import Backend, backend
from dflashctl.lab.pct.errors import Die
from dflashctl.lab.pct.output import err, out
from dflashctl.lab.pct.status import is_running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dflashctl.lab.pct.state import State

SHUTDOWN_TIMEOUT_S = 60


def start(state: State, vmid: int, *, skip_lock: bool) -> int:
    """`pct start`. Returns the exit code; Die before the task when it runs already."""
    if is_running(state, vmid):
        raise Die(f"CT {vmid} already running\n")

    def work(found: config.Config) -> None:
        if found.template:
            raise Die("you can't start a CT if it's a template\n")
        if not skip_lock and found.get("lock") != "mounted":
            _refuse_lock(found)
        backend(state, vmid).start()

    return _task(state, vmid, work)


def stop(state: State, vmid: int, *, skip_lock: bool) -> int:
    """`pct stop`: kill it."""
    _must_run(state, vmid, "CT")

    def work(found: config.Config) -> None:
        if not skip_lock and found.get("lock") != "mounted":
            _refuse_lock(found)
        _end(backend(state, vmid), None, force=True)

    return _task(state, vmid, work)


def shutdown(state: State, vmid: int, timeout_s: int | None, *, force: bool) -> int:
    """`pct shutdown`: ask it to end, wait up to timeout_s (60), kill it only with --forceStop."""
    _must_run(state, vmid, "CT")
    wait_s = SHUTDOWN_TIMEOUT_S if timeout_s is None else timeout_s

    def work(found: config.Config) -> None:
        _refuse_lock(found)
        _end(backend(state, vmid), wait_s, force=force)

    return _task(state, vmid, work)


def reboot(state: State, vmid: int, timeout_s: int | None) -> int:
    """`pct reboot`: shut down (killing it after the timeout) and start."""
    _must_run(state, vmid, "VM")
    wait_s = SHUTDOWN_TIMEOUT_S if timeout_s is None else timeout_s

    def work(found: config.Config) -> None:
        container = backend(state, vmid)
        _end(container, wait_s, force=True)
        container.start()

    return _task(state, vmid, work)


def suspend(state: State, vmid: int) -> int:
    """`pct suspend`: a checkpoint to disk by CRIU, which is not installed here, as on most hosts."""
    _must_run(state, vmid, "CT")

    def work(found: config.Config) -> None:
        _refuse_lock(found)
        _checkpoint(vmid, "-s -D")

    return _task(state, vmid, work)


def resume(state: State, vmid: int) -> int:
    """`pct resume`: restore from a checkpoint; there is none."""
    if is_running(state, vmid):
        raise Die(f"CT {vmid} already running\n")
    return 0 if worker.run(lambda: _checkpoint(vmid, "-r --foreground -D")) else 255


def _must_run(state: State, vmid: int, kind: str) -> None:
    if not is_running(state, vmid):
        raise Die(f"{kind} {vmid} not running\n")


def _refuse_lock(found: config.Config) -> None:
    if found.get("lock"):
        raise Die(f"CT is locked ({found.get('lock')})\n")


def _task(state: State, vmid: int, work: Callable[[config.Config], None]) -> int:
    """Run work in a worker, under the container's lock, with its configuration. 255 whatever went wrong."""

    def task() -> None:
        lock.acquire(state.lock_dir, vmid)
        work(config.load(state, vmid, err).now)

    return 0 if worker.run(task) else 255


def _end(container: Backend, timeout_s: float | None, *, force: bool) -> None:
    if container.stop(timeout_s, force=force):
        return
    flags = "--kill" if timeout_s is None else f"{'' if force else '--nokill '}--timeout {timeout_s:.0f}"
    out(f"command 'lxc-stop -n {container.vmid} {flags}' failed: exit code 1\n")
    raise Die("container did not stop\n")


def _checkpoint(vmid: int, flags: str) -> None:
    out(
        f"lxc-checkpoint: {vmid}: ../src/lxc/criu.c: criu_version_ok: 767 No such file or directory"
        " - execing criu failed, is it installed?\n"
        f"lxc-checkpoint: {vmid}: ../src/lxc/tools/lxc_checkpoint.c: checkpoint: 182"
        f" Checkpointing {vmid} failed\n"
    )
    raise Die(f"command 'lxc-checkpoint -n {vmid} {flags} /var/lib/vz/dump' failed: exit code 1\n")
