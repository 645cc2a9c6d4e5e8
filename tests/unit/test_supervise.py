"""Run with: pytest tests/unit/test_supervise.py. What a program gets, and how its end is told."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.processes import oom, proc, signals
from dflashctl.agent.records.runfolder import RunFolder
from dflashctl.agent.runs import ending, lastword, supervise

TELL = r"""
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "env": dict(os.environ), "cwd": os.getcwd(), "stdin": os.path.realpath("/proc/self/fd/0"),
    "session": os.getsid(0), "pid": os.getpid(), "umask": os.umask(0),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "blocked": int(status["SigBlk"], 16), "ignored": int(status["SigIgn"], 16),
    "hup": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, "ppid": os.getppid(),
}), flush=True)
print("on stderr", file=sys.stderr)
"""


def step(now: float = 100.0, **changes: Any) -> str:
    facts: dict[str, Any] = {
        "leader_ended": None,
        "failed": False,
        "kill_at": None,
        "termed": None,
        "members": 3,
        "grace_s": 10.0,
    }
    return ending.next_step(now, **{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "wait"),
        ({"kill_at": 110.0}, "term_leader"),
        ({"kill_at": 101.0, "termed": 91.0}, "wait"),
        ({"kill_at": 100.0, "termed": 90.0}, "kill"),
        ({"kill_at": 100.0}, "kill"),
        ({"leader_ended": 99.0, "members": 0}, "done"),
        ({"leader_ended": 99.0, "members": 0, "failed": True, "kill_at": 60.0}, "done"),
        ({"leader_ended": 99.0}, "wait"),
        ({"leader_ended": 90.0}, "term_family"),
        ({"leader_ended": 100.0, "failed": True}, "term_family"),
        ({"leader_ended": 95.0, "failed": True, "termed": 95.0}, "wait"),
        ({"leader_ended": 85.0, "failed": True, "termed": 90.0}, "kill"),
        ({"leader_ended": 95.0, "failed": True, "kill_at": 104.0, "termed": 94.0}, "term_family"),
        ({"leader_ended": 95.0, "failed": False, "kill_at": 104.0, "termed": 94.0}, "term_family"),
        ({"leader_ended": 95.0, "failed": True, "kill_at": 100.0, "termed": 95.0}, "kill"),
    ],
)
def test_each_stage_of_an_ending_has_one_step(changes: dict[str, Any], expected: str) -> None:
    assert step(**changes) == expected


@given(
    st.floats(0, 50),
    st.booleans(),
    st.floats(0, 200) | st.none(),
    st.floats(0, 200) | st.none(),
    st.integers(1, 9),
)
def test_an_ending_family_is_killed_at_last(
    leader_after: float, failed: bool, kill_at: float | None, termed: float | None, members: int
) -> None:
    """Whatever came before: a while after the leader's end nothing but KILL or one TERM is left to do."""
    facts = {"leader_ended": leader_after, "failed": failed, "kill_at": kill_at, "members": members}
    late = 1000.0
    first = step(late, termed=termed, **facts)
    assert first in ("term_family", "kill")
    if first == "term_family":
        assert step(late + 11, termed=late, **facts) == "kill"


def test_the_last_request_before_the_end_is_the_killer() -> None:
    events = [
        {"event": "kill_requested", "mono": 5.0, "who": "ada", "reason": "slow"},
        {"event": "signalled", "mono": 5.1},
        {"event": "kill_requested", "mono": 9.0, "who": "late"},
        {"event": "kill_requested", "who": "damaged"},
    ]
    assert ending.killer(events, before=6.0) == {"who": "ada", "reason": "slow"}
    assert ending.killer(events, before=4.0) is None
    assert ending.killer(events, before=None) == {"who": "late", "reason": ""}


def test_the_most_impatient_kill_sets_the_end_of_the_grace() -> None:
    patient = {"event": "kill_requested", "mono": 5.0, "grace_s": 60.0}
    hasty = {"event": "kill_requested", "mono": 9.0, "grace_s": 0}
    plain = {"event": "kill_requested", "mono": 1.0}
    assert ending.kill_time([patient], 15.0) == 65.0
    assert ending.kill_time([patient, hasty], 15.0) == 9.0
    assert ending.kill_time([plain, {"event": "note", "mono": 0.0}], 15.0) == 16.0
    assert ending.kill_time([{"event": "kill_requested"}], 15.0) is None


def test_oom_counters_of_both_cgroup_versions() -> None:
    assert oom.parse("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n") == 2
    assert oom.parse("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n") == 7
    assert oom.parse("low 0\n") is None
    assert oom.candidates("0::/a\n", "/c")[:2] == ["/c/a/memory.events", "/c/memory.events"]
    mixed = oom.candidates("4:cpu,memory:/lxc/200\n0::/\n", "/c")
    assert mixed[0] == "/c/memory/lxc/200/memory.oom_control"
    assert "/c/unified/memory.events" in mixed


def test_oom_kills_of_the_machine_where_no_cgroup_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 4\n")
    monkeypatch.setattr(oom, "VMSTAT", str(vmstat))
    monkeypatch.setattr(oom, "candidates", lambda text: [str(tmp_path / "none")])
    before = oom.oom_kills()
    assert before == {"container": None, "machine": 4}
    vmstat.write_text("nr_free_pages 5\noom_kill 6\n")
    assert oom.during(before, oom.oom_kills()) == {"container": None, "machine": 2}
    vmstat.unlink()
    assert oom.during(before, oom.oom_kills()) == {"container": None, "machine": None}


def test_an_oom_kill_needs_a_count_and_a_death(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(str(box.root))
    counts = iter([(1, 5), (2, 6), (2, 6), (None, 6)])
    monkeypatch.setattr(
        supervise, "oom_kills", lambda: dict(zip(("container", "machine"), next(counts), strict=True))
    )
    supervisor = supervise.Supervisor(run, {"grace_s": 1})
    supervisor.signal, supervisor.kill_seen = 9, True
    first = supervisor.exit()
    assert first["oom"] is True and first["oom_kills"] == {"container": 1, "machine": 1}
    supervisor.kill_seen = False
    assert supervisor.exit()["oom"] is False
    supervisor.kill_seen = True
    last = supervisor.exit()  # the machine's count names no victim: it proves nothing
    assert last["oom"] is False and last["oom_kills"] == {"container": None, "machine": 1}


def test_a_program_starts_clean(box: Any) -> None:
    answer = box.python(TELL, secrets={"HF_TOKEN": "hunter2"}, settle_s=10.0)
    assert answer["exit"]["code"] == 0
    first, second = box.log(answer).splitlines()
    told = json.loads(first)
    assert second == "on stderr"
    assert told["env"] == {
        "PATH": os.environ["PATH"],
        "DFLASH_RUN_ID": answer["id"],
        "HF_TOKEN": "hunter2",
    } | ({"LC_CTYPE": told["env"]["LC_CTYPE"]} if "LC_CTYPE" in told["env"] else {})  # Python's own coercion
    assert told["cwd"] == str(box.root)
    assert told["stdin"] == "/dev/null"
    assert told["session"] == told["pid"] == answer["leader"]["pid"]
    assert told["umask"] == 0o022
    assert told["fds"] == [0, 1, 2, 3]  # 3 is the listing itself
    assert told["nofile"][0] == min(told["nofile"][1], 1 << 20)
    assert told["blocked"] == 0
    assert told["hup"] is True
    assert told["ignored"] & (1 << (signal.SIGHUP - 1) | 1 << (signal.SIGCHLD - 1)) == 0


def test_a_secret_is_in_no_file_and_no_command_line(box: Any) -> None:
    answer = box.python("import time; time.sleep(30)", secrets={"HF_TOKEN": "hunter2-secret"})
    run = box.run(answer)
    for file in Path(run.path).iterdir():
        assert b"hunter2-secret" not in file.read_bytes(), file
    supervisor = run.identities()[0]
    assert supervisor is not None
    for name in ("cmdline", "environ"):
        assert b"hunter2-secret" not in Path(f"/proc/{supervisor[0]}/{name}").read_bytes()
    assert b"hunter2-secret" not in Path(f"/proc/{answer['leader']['pid']}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("program", "code", "number", "cause"),
    [
        ("pass", 0, None, "exited"),
        ("raise SystemExit(3)", 3, None, "exited"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, signal.SIGSEGV, "signalled"),
        ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL, "signalled"),
    ],
)
def test_an_end_is_written_with_its_code_or_signal(
    box: Any, program: str, code: int | None, number: int | None, cause: str
) -> None:
    before = time.time()
    ended = box.wait(box.python(program))
    assert (ended["code"], ended["signal"], ended["cause"]) == (code, number, cause)
    assert ended["killed_by"] is None and ended["oom"] is False
    assert before - 1 < ended["started_at"] <= ended["ended_at"] <= time.time()
    assert 0 < ended["wall_s"] < 600
    assert ended["version"] == 1


def test_the_started_record_names_everybody(box: Any) -> None:
    answer = box.python("import time; time.sleep(30)")
    run = box.run(answer)
    started = run.supervisor().value
    assert started is not None
    assert started["leader"] == answer["leader"]
    assert started["boot_id"] == proc.boot_id() and started["init_start"] == proc.init_start()
    assert abs(started["started_at"] - time.time()) < 120
    assert 0 <= time.monotonic() - started["mono"] < 120
    assert run.live()
    assert [event["event"] for event in run.events()] == ["launched", "started"]


def test_peak_memory_is_of_the_whole_family(box: Any, until: Callable[..., Any]) -> None:
    """Two children hold 60 MB each until the supervisor has looked: it has, once it has written down `mark`,
    who was born after them."""
    program = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'x = bytearray(60_000_000); print(1, flush=True); input()']\n"
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}\n"
        "two = [subprocess.Popen(child, **pipes) for _ in range(2)]\n"
        "[one.stdout.readline() for one in two]\n"
        "mark = subprocess.Popen(['sh', '-c', 'until [ -e seen ]; do sleep 0.05; done'])\n"
        "open('mark', 'w').write(f'{mark.pid} ')\n"
        "mark.wait()\n"
        "[one.communicate(b'\\n') for one in two]\n"
    )
    answer = box.python(program)
    mark = int(until(lambda: (box.root / "mark").exists() and (box.root / "mark").read_text()))
    until(lambda: mark in {pid for pid, _ in box.run(answer).identities()[1]})
    (box.root / "seen").touch()
    ended = box.wait(answer)
    assert 120_000_000 < ended["peak_rss_bytes"] < 400_000_000


def test_what_the_leader_leaves_behind_is_ended_after_the_grace(box: Any, until: Callable[..., Any]) -> None:
    """Twice forked, in its own session, deaf to TERM: it stays the supervisor's, and the run is not over."""
    program = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        open('orphan', 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    answer = box.python(program, grace_s=1.0)
    orphan = int(until(lambda: (box.root / "orphan").exists() and (box.root / "orphan").read_text()))
    run = box.run(answer)
    until(lambda: any(event["event"] == "exited" for event in run.events()))
    assert not run.has("exit.json"), "a run is not over while somebody of it lives"
    assert [one.pid for one in box.family(answer)] == [orphan]
    ended = box.wait(answer)
    assert ended["code"] == 0 and ended["cause"] == "exited"
    assert 2.0 <= ended["wall_s"] < 50, "its grace, and that of TERM"
    signalled = [(event["signal"], event["pids"]) for event in run.events() if event["event"] == "signalled"]
    assert signalled == [(15, [orphan]), (9, [orphan])]
    assert proc.read_process(orphan) is None or proc.table()[orphan].dead


def test_after_a_failure_nobody_waits_for_the_others(box: Any) -> None:
    """A dead rank's peers would sit in a collective: they get TERM at once."""
    program = (
        "import subprocess, sys\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "raise SystemExit(2)\n"
    )
    ended = box.wait(box.python(program, grace_s=60.0))
    assert ended["code"] == 2
    assert ended["wall_s"] < 30, "not for the grace"


def test_sigterm_to_the_supervisor_is_an_orderly_stop(box: Any, until: Callable[..., Any]) -> None:
    program = (
        "import signal, sys, time\n"
        "def bye(*_):\n"
        "    print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    answer = box.python(program)
    until(lambda: "ready" in box.log(answer))
    supervisor = box.run(answer).identities()[0]
    assert supervisor is not None
    signals.send_signal(supervisor, signal.SIGTERM)
    ended = box.wait(answer)
    assert "saved" in box.log(answer)
    assert (ended["code"], ended["cause"]) == (0, "killed")
    assert ended["killed_by"]["who"] == f"SIGTERM to the supervisor, from pid {os.getpid()}"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGPIPE])
def test_the_end_of_a_connection_ends_no_run(box: Any, number: int) -> None:
    answer = box.launch(["sh", "-c", "until [ -e go ]; do sleep 0.05; done"])
    supervisor = box.run(answer).identities()[0]
    assert supervisor is not None
    assert signals.send_signal(supervisor, number)
    (box.root / "go").touch()
    ended = box.wait(answer)
    assert (ended["code"], ended["cause"]) == (0, "exited")


def test_the_supervisor_belongs_to_no_session_of_ours(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python("import time; time.sleep(30)")
    supervisor = proc.living(box.run(answer).identities()[0])
    assert supervisor is not None
    assert supervisor.session == supervisor.pid != os.getsid(0)
    for fd in (0, 1):  # its word of the start goes out just before its stdout is closed
        until(lambda fd=fd: os.path.realpath(f"/proc/{supervisor.pid}/fd/{fd}") == "/dev/null")
    assert os.path.realpath(f"/proc/{supervisor.pid}/cwd") == "/"


def test_members_are_on_disk_for_the_day_the_supervisor_is_gone(box: Any, until: Callable[..., Any]) -> None:
    program = "import subprocess, time; subprocess.Popen(['sleep', '60'], env={}); time.sleep(60)"
    answer = box.python(program)
    run = box.run(answer)
    recorded = until(lambda: (read := run.read("members.json").value) and len(read["members"]) == 2 and read)
    assert proc.same_place(recorded)
    assert {one["pid"] for one in recorded["members"]} == {one.pid for one in box.family(answer)}


def test_a_run_without_its_started_record_is_not_left_alone(
    box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the record cannot be written (a full disk), the program is ended: nobody could find it again."""
    run = RunFolder(str(box.root))
    record = box.request(["sleep", "60"])["record"]

    def full(name: str, value: Any, *, durable: bool = True) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write", full)
    supervisor = supervise.Supervisor(run, record)
    why = supervisor.start({})
    assert why is not None and "No space left" in why
    assert supervisor.leader is not None and proc.living(supervisor.leader) is None


def test_exit_json_waits_for_room_on_the_disk(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(str(box.root))
    tries: list[int] = []
    write = run.write

    def full_at_first(name: str, value: Any, *, durable: bool = True) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        write(name, value)

    monkeypatch.setattr(run, "write", full_at_first)
    monkeypatch.setattr(lastword, "EXIT_RETRY_S", 0.01)
    lastword.write_exit(run, {"code": 0})
    assert run.exit().value == {"code": 0, "version": 1}


def test_without_a_record_the_supervisor_says_so_and_starts_nothing(tmp_path: Path) -> None:
    import subprocess

    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from dflashctl.agent.runs.supervise import main; raise SystemExit(main({str(tmp_path)!r}))",
        ],
        cwd=root,
        input=b"{}",
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"failed": "there is no record.json"}


def test_files_of_a_run_are_readable_by_others(box: Any) -> None:
    answer = box.python("pass")
    box.wait(answer)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in Path(box.run(answer).path).iterdir()}
    assert modes["exit.json"] == modes["record.json"] == modes["supervisor.json"] == 0o644
