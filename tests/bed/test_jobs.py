"""The job programs behave as they are named, each in a real container: who is left after which signal, who
holds a GPU, what the log looks like. Whatever judges runs is tested against them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bedkit.bed import Bed

pytestmark = pytest.mark.bed

JOBS = Path(__file__).parent / "jobs"
GRACE_S = 90.0


class Started:
    """A job started in a container past dflashctl, in a session of its own, output to a log."""

    def __init__(self, bed: Bed, role: str, argv: list[str], gpus: str) -> None:
        self.bed, self.role = bed, role
        for source in JOBS.iterdir():
            if source.is_file():
                shutil.copyfile(source, bed.layout.shared / source.name)
        script = 'cd /workspace; exec setsid "$@" >log 2>&1 </dev/null & echo $!'
        env = ["env", f"CUDA_VISIBLE_DEVICES={gpus}", "PATH=/usr/bin:/bin", "PYTHONUNBUFFERED=1"]
        self.argv = ["sh", "-c", script, "sh", *env, *argv]
        self.pid = int(bed.inside(role, self.argv).stdout)

    def log(self) -> bytes:
        return self.bed.inside(self.role, ["cat", "/workspace/log"]).stdout

    def alive(self) -> dict[int, str]:
        """pid inside -> its command line, for everybody but the container's own sleep and first process."""
        script = (
            "for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n = $$ ] || [ $n = 1 ] || "
            'echo "$n $(tr "\\0" " " < $p/cmdline 2>/dev/null)"; done'
        )
        rows = self.bed.inside(self.role, ["sh", "-c", script]).stdout.decode(errors="replace").splitlines()
        table = dict(row.partition(" ")[::2] for row in rows)
        quiet = ("", "sleep 3600 ")
        return {int(pid): line for pid, line in table.items() if line not in quiet and "for p in" not in line}

    def stat(self, pid: int) -> list[str]:
        """/proc/PID/stat from the state on: state, parent, group, session; question marks when it is gone."""
        done = self.bed.inside(self.role, ["cat", f"/proc/{pid}/stat"], check=False)
        return done.stdout.decode().rsplit(")", 1)[1].split() if done.returncode == 0 else ["?"] * 4

    def state(self, pid: int) -> str:
        return self.stat(pid)[0]

    def kill(self, number: int, pid: int | None = None) -> None:
        self.bed.inside(self.role, ["sh", "-c", f"kill -{number} {pid or self.pid}"])

    def gone(self) -> bool:
        return self.alive() == {}


@pytest.fixture
def job(bed: Bed) -> Iterator[Callable[..., Started]]:
    """`job("ranks", gpus="0,1")` starts job.py in container main; sh=True: job.sh in the container without
    Python."""

    def start(kind: str, *args: str, gpus: str = "0", sh: bool = False) -> Started:
        if sh:
            return Started(bed, "bare", ["/bin/sh", "/srv/host/job.sh", kind, *args], gpus)
        return Started(bed, "main", [sys.executable, "/srv/host/job.py", kind, *args], gpus)

    yield start


def wait_for(what: Callable[[], object], seconds: float = GRACE_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"did not become true within {seconds} s"
        time.sleep(0.05)


def test_ranks_have_sessions_of_their_own_and_outlive_a_killed_leader(
    bed: Bed, job: Callable[..., Started]
) -> None:
    run = job("ranks", gpus="0,1,2")
    wait_for(lambda: len(bed.gpu_holders()) == 3)
    assert len(run.alive()) == 4
    stats = [f"/proc/{pid}/stat" for pid in run.alive()]
    sessions = bed.inside("main", ["cut", "-d ", "-f6", *stats]).stdout.split()
    assert len(set(sessions)) == 4
    run.kill(signal.SIGKILL)
    wait_for(lambda: run.pid not in run.alive())
    assert len(bed.gpu_holders()) == 3, "the ranks are orphans and keep their GPUs"


def test_ranks_end_with_a_leader_that_is_asked(bed: Bed, job: Callable[..., Started]) -> None:
    run = job("ranks", gpus="0,1")
    wait_for(lambda: len(bed.gpu_holders()) == 2)
    run.kill(signal.SIGTERM)
    wait_for(run.gone)
    assert bed.gpu_holders() == []


def test_a_renamed_worker_has_lost_name_and_environment(bed: Bed, job: Callable[..., Started]) -> None:
    run = job("renames")
    wait_for(lambda: any("VLLM::Worker_TP0" in line for line in run.alive().values()))
    [worker] = [pid for pid, line in run.alive().items() if "VLLM" in line]
    environ = bed.inside("main", ["cat", f"/proc/{worker}/environ"]).stdout
    assert b"CUDA_VISIBLE_DEVICES" not in environ
    assert bed.inside("main", ["cat", f"/proc/{worker}/comm"]).stdout == b"VLLM::Worker_TP\n"
    names = bed.on_host(["nvidia-smi", "--query-compute-apps=process_name", "--format=csv,noheader"]).stdout
    assert names == b"VLLM::Worker_TP0\n"


@pytest.mark.parametrize("sh", [False, True])
def test_one_that_ignores_term_ends_by_kill_only(bed: Bed, job: Callable[..., Started], sh: bool) -> None:
    run = job("ignores-term", sh=sh)
    wait_for(lambda: b"step 1 " in run.log())
    run.kill(signal.SIGTERM)
    time.sleep(0.5)
    assert run.pid in run.alive()
    run.kill(signal.SIGKILL)
    wait_for(lambda: run.pid not in run.alive())


@pytest.mark.parametrize("sh", [False, True])
def test_a_double_fork_escapes_from_parent_and_session(
    bed: Bed, job: Callable[..., Started], sh: bool
) -> None:
    run = job("double-forks", *([] if sh else ["--leave"]), sh=sh)
    wait_for(lambda: len(bed.gpu_holders()) >= 1)
    run.kill(signal.SIGKILL) if sh else wait_for(lambda: run.pid not in run.alive())
    parents = []
    for pid, _ in bed.gpu_holders():  # in the shell's case also its short-lived sleeps
        status = bed.on_host(["cat", f"/proc/{pid}/status"], check=False).stdout.decode()
        inner = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
        parents += [run.stat(int(n))[1] for n in inner]
    assert "1" in parents, "adopted by the container's first process"


@pytest.mark.parametrize("sh", [False, True])
def test_stalled_spinning_and_stopped_jobs_write_no_more(
    bed: Bed, job: Callable[..., Started], sh: bool
) -> None:
    for kind, states in (("stalls", "S"), ("spins", "R"), ("stops", "T")):
        run = job(kind, "60", gpus="1", sh=True) if sh else job(kind, "--step", "0.05", gpus="1")
        wait_for(lambda run=run: run.log().count(b"step") == 3)
        worker = run.pid

        def settled(run: Started = run, worker: int = worker, states: str = states) -> bool:
            return run.state(worker) in states or any(run.state(p) in states for p in run.alive())

        wait_for(settled)
        before = run.log()
        time.sleep(0.3)
        assert run.log() == before and run.pid in run.alive()
        bed.reset()


def test_a_wedged_job_has_tracebacks_and_looks_alive(bed: Bed, job: Callable[..., Started]) -> None:
    run = job("wedges")
    wait_for(lambda: run.log().count(b"\nAssertionError: ") == 3)
    assert run.pid in run.alive() and run.state(run.pid) == "S"


@pytest.mark.parametrize(("kind", "text"), [("crashes", b"ValueError: tap layer 61"), ("exits", b"step 2")])
def test_failing_jobs_leave_their_last_words(
    bed: Bed, job: Callable[..., Started], kind: str, text: bytes
) -> None:
    run = job(kind, "--step", "0.05")
    wait_for(run.gone)
    assert text in run.log().splitlines()[-1]
    assert (b"Traceback" in run.log()) == (kind == "crashes")


def test_a_memory_hog_is_killed_by_the_kernel_alone(bed: Bed, job: Callable[..., Started]) -> None:
    """In the container with the smallest memory limit; the others of the container live."""
    shutil.copyfile(JOBS / "job.py", bed.layout.shared / "job.py")
    script = "python3 /srv/host/job.py hogs >/workspace/log 2>&1; echo $?"
    done = bed.inside("newer", ["sh", "-c", script], timeout=60)
    assert done.stdout == b"137\n", "SIGKILL, and the shell that waited for it lived"
    assert bed.state("newer") == "RUNNING"


def test_progress_has_no_newline(bed: Bed, job: Callable[..., Started]) -> None:
    for sh in (False, True):
        run = job("progress", sh=sh)
        wait_for(lambda run=run: run.log().count(b"\rtraining") >= 3)
        assert b"\n" not in run.log()


@pytest.mark.parametrize("sh", [False, True])
def test_a_flood_is_50_mb_and_fast(bed: Bed, job: Callable[..., Started], sh: bool) -> None:
    """Fast: in far less time than line by line would take."""
    began = time.monotonic()
    run = job("floods", sh=sh)
    wait_for(run.gone)
    size = int(bed.inside(run.role, ["stat", "-c", "%s", "/workspace/log"]).stdout)
    assert 49_000_000 < size < 51_000_000 and time.monotonic() - began < 60
    assert bed.inside(run.role, ["tail", "-n", "1", "/workspace/log"]).stdout == b"flood is over\n"


def test_escapes_reach_the_log_raw(bed: Bed, job: Callable[..., Started]) -> None:
    run = job("escapes")
    wait_for(lambda: b"step 1 " in run.log())
    log = run.log()
    for piece in (b"\x1b[2J", b"\x1b]0;", b"\x07", b"\x00", b"[bold red]", b"\xff\xfe", "\u202e".encode()):
        assert piece in log


def test_the_heartbeat_is_fresh_and_whole(bed: Bed) -> None:
    import json

    shutil.copyfile(JOBS / "job.py", bed.layout.shared / "job.py")
    bed.inside("main", ["mkdir", "/workspace/run"])
    script = 'exec setsid env DFLASH_RUN_DIR=/workspace/run "$@" >/workspace/log 2>&1 </dev/null &'
    argv = [sys.executable, "/srv/host/job.py", "heartbeat", "--step", "0.02"]
    bed.inside("main", ["sh", "-c", script, "sh", *argv])
    wait_for(
        lambda: (
            bed.inside("main", ["test", "-f", "/workspace/run/heartbeat.json"], check=False).returncode == 0
        )
    )
    steps = set()
    for _ in range(20):
        beat = json.loads(bed.inside("main", ["cat", "/workspace/run/heartbeat.json"]).stdout)
        steps.add(beat["step"])
        assert beat["version"] == 1 and beat["phase"] == "training"
    assert len(steps) > 3


def test_the_start_up_hook_takes_what_cuda_would(bed: Bed) -> None:
    """Through the laptop's Python in an unprivileged container, the hook first on its path."""
    hook = Path(__file__).parents[2] / "dflashctl" / "lab" / "gpu" / "hook" / "sitecustomize.py"
    shutil.copyfile(hook, bed.layout.shared / "sitecustomize.py")
    argv = ["env", "PYTHONPATH=/srv/host", "CUDA_VISIBLE_DEVICES=6,7", sys.executable, "-c"]
    enter = ["nsenter", "-t", str(bed.pid), "--mount", "--pid", "--uts", "--", "lxc-attach"]
    enter += ["-P", str(bed.layout.lxc), "-n", str(bed.ids["main"]), "--", *argv]
    p = subprocess.Popen(
        [*enter, "print('up', flush=True); import time; time.sleep(60)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert p.stdout is not None and p.stdout.readline() == b"up\n"
        assert bed.gpu_memory() == [0, 0, 0, 0, 4, 0, 518, 518]
    finally:
        p.kill()
        p.wait(10)
        if p.stdout is not None:
            p.stdout.close()
