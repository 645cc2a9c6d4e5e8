"""`pct`: from the command line to the exit code."""

from __future__ import annotations

import os
import signal
import sys

from dflashctl.lab.pct import commands, config, lock, power, status, transfer, worker
from dflashctl.lab.pct import locale as callers_locale
from dflashctl.lab.pct.backends import Backend, backend
from dflashctl.lab.pct.errors import Die, ParameterError
from dflashctl.lab.pct.output import err, out
from dflashctl.lab.pct.state import VARIABLE, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
# Perl runs pct with -T and refuses to start a program while one of these is set; it names the first it finds.
_TAINTED = (b"IFS", b"CDPATH", b"ENV", b"BASH_ENV")


def main() -> NoReturn:
    """Run pct with sys.argv and leave with its exit code, without passing through Python's own exit."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = run([os.fsencode(word) for word in sys.argv[1:]], callers_locale.environment())
    except Die as error:
        err(error.text)
        code = error.code
    os._exit(code)


def run(argv: list[bytes], env: dict[bytes, bytes]) -> int:
    """One call of pct: argv without the program's name, env as the caller set it. Returns the exit code;
    Die."""
    folder = env.pop(VARIABLE, b"")
    if not folder:
        raise Die(f"pct stand-in: {VARIABLE.decode()} is not set\n")
    state = State(os.fsdecode(folder))
    if state.startup_delay_s > 0:
        import time

        time.sleep(state.startup_delay_s)
    codec, warning = callers_locale.codec(env)
    err(warning)
    env[b"PATH"] = PATH
    os.environb.clear()  # what the programs that we start find
    os.environb.update(env)
    word = argv[0].decode("latin-1") if argv else ""
    if not word:
        raise Die(commands.usage_list("no command specified", state.version))
    if os.geteuid() != 0:
        raise Die("please run as root\n", 2)
    name, command = commands.find(word, state.version)
    if not command.known:
        raise Die(f"pct stand-in: there is no `pct {name}` here\n")
    try:
        values = commands.parameters(command, argv[1:], codec, state.version, posix=b"POSIXLY_CORRECT" in env)
        return _COMMANDS[name](Call(state, env, values))
    except ParameterError as error:
        error.text += command.usage(f"pct {name}", state.version)
        raise


class Call:
    """The parameters of one call, typed."""

    def __init__(self, state: State, env: dict[bytes, bytes], values: dict[str, commands.Value]) -> None:
        self.state = state
        self.env = env
        self.values = values

    @property
    def vmid(self) -> int:
        return int(self.values["vmid"])  # type: ignore[arg-type]

    def text(self, name: str) -> str:
        return str(self.values[name])

    def optional(self, name: str) -> str | None:
        return self.text(name) if name in self.values else None

    def switch(self, name: str, default: bool = False) -> bool:
        return bool(self.values.get(name, default))

    def seconds(self, name: str) -> int | None:
        return int(self.text(name)) if name in self.values else None

    def load(self) -> config.Config:
        return config.load(self.state, self.vmid, err).now


def _list(call: Call) -> int:
    out(status.listing(call.state, err))
    return 0


def _status(call: Call) -> int:
    found = call.load()
    if call.switch("verbose"):
        out(status.verbose(call.state, call.vmid, found))
    else:
        out(f"status: {'running' if status.is_running(call.state, call.vmid) else 'stopped'}\n")
    return 0


def _config(call: Call) -> int:
    snapshot, current = call.optional("snapshot"), call.switch("current")
    if snapshot and current:
        text = "cannot use 'snapshot' parameter with 'current'\n"
        raise ParameterError(f"Parameter verification failed.\nsnapshot: {text}current: {text}")
    file = config.load(call.state, call.vmid, err)
    if snapshot:
        if snapshot not in file.snapshots:
            raise Die(f"snapshot '{snapshot}' does not exist\n")
        shown = file.snapshots[snapshot]
    else:
        shown = config.shown(file, current=current)
    out("".join(config.lines(shown)))
    return 0


def _exec(call: Call) -> int:
    found = call.load()
    if not status.is_running(call.state, call.vmid):
        raise Die(f"container '{call.vmid}' not running!\n")
    argv = call.values["extra-args"]
    assert isinstance(argv, list)
    if not argv:
        raise Die(f"missing command {call.state.at('missing command')}.\n")
    env = dict(call.env)
    if call.state.version >= (5, 0, 9):
        env.pop(b"SSL_CERT_FILE", None)
        env.pop(b"SSL_CERT_DIR", None)
    if tainted := _tainted(call):
        raise Die(f"{tainted} {call.state.at('exec')}.\n")
    configured = [b"TERM=linux"]  # Proxmox writes this into every container's LXC configuration
    for key, value in found.lxc:
        at_run_time = key == "lxc.environment.runtime" and call.state.version >= (6, 0, 15)
        if key == "lxc.environment" or at_run_time:
            configured.append(value.encode())
    words = [word.encode() for word in argv]
    keep = call.switch("keep-env", True)
    return backend(call.state, call.vmid).attach(words, env, configured, keep=keep)


def _tainted(call: Call) -> str:
    for name in _TAINTED:
        if name in call.env:
            return f"Insecure $ENV{{{name.decode()}}} while running with -T switch"
    return ""


def _init_pid(call: Call, container: Backend) -> int:
    """The container's first process, which the real tool asks lxc-info for."""
    if tainted := _tainted(call):
        where = "at /usr/lib/x86_64-linux-gnu/perl-base/IPC/Open3.pm line 176"
        raise Die(f"command 'lxc-info -n {call.vmid} -p' failed: {tainted} {where}.\n")
    return container.init_pid()


def _push(call: Call) -> int:
    holder = lock.acquire(call.state.lock_dir, call.vmid)
    if not status.is_running(call.state, call.vmid):
        raise Die("can only push files to a running CT\n")
    unprivileged = call.load().unprivileged
    container = backend(call.state, call.vmid)
    ownership = _ownership(call)

    def work() -> None:
        pid = _init_pid(call, container)
        transfer.push(pid, unprivileged, call.text("file"), call.text("destination"), ownership, call.state)

    worker.run(work)
    os.close(holder)
    return 0  # whatever became of it


def _pull(call: Call) -> int:
    holder = lock.acquire(call.state.lock_dir, call.vmid)
    if not status.is_running(call.state, call.vmid):
        raise Die(f"can only pull files from a running VM {call.state.at('pull')}.\n")
    container = backend(call.state, call.vmid)
    ownership = _ownership(call)

    def work() -> None:
        pid = _init_pid(call, container)
        transfer.pull(pid, call.text("path"), call.text("destination"), ownership, call.state)

    worker.run(work)
    os.close(holder)
    return 0  # whatever became of it


def _ownership(call: Call) -> transfer.Ownership:
    return transfer.Ownership(call.optional("perms"), call.optional("user"), call.optional("group"))


_COMMANDS = {
    "list": _list,
    "status": _status,
    "config": _config,
    "exec": _exec,
    "push": _push,
    "pull": _pull,
    "start": lambda call: power.start(call.state, call.vmid, skip_lock=call.switch("skiplock")),
    "stop": lambda call: power.stop(call.state, call.vmid, skip_lock=call.switch("skiplock")),
    "shutdown": lambda call: power.shutdown(
        call.state, call.vmid, call.seconds("timeout"), force=call.switch("forceStop")
    ),
    "reboot": lambda call: power.reboot(call.state, call.vmid, call.seconds("timeout")),
    "suspend": lambda call: power.suspend(call.state, call.vmid),
    "resume": lambda call: power.resume(call.state, call.vmid),
}
