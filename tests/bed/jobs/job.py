#!/usr/bin/env python3
"""Programs that behave like real training jobs, one kind an argument: `job.py KIND [--seconds S] [--step S]`.

Stdlib only, Python >= 3.8, one file, so that it can be deployed alone. A job takes the GPUs of
CUDA_VISIBLE_DEVICES (through the start-up hook of the lab's Python, else by opening the devices itself),
prints `step N loss X` lines and ends by itself after --seconds, so that a forgotten one does no harm for
long."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HELD = []
BEGUN = time.monotonic()


def visible_gpus():
    """Device numbers that CUDA_VISIBLE_DEVICES names, by number or uuid."""
    numbers = {}
    lab = Path(os.environ.get("NVIDIA_LAB_RPC", "/run/nvidia-lab"))
    for line in (lab / "uuids").read_text().splitlines():
        number, uuid = line.split()
        numbers[uuid] = number
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [numbers.get(e, e) for e in entries if e in numbers or e.isdigit()]


def take_gpus(indices=None, mib=1000):
    """Open the devices, as CUDA would keep them open."""
    if indices is None:
        if getattr(sys.modules.get("sitecustomize"), "_held", None):
            return
        indices = visible_gpus()
    dev = os.environ.get("NVIDIA_LAB_DEV", "/dev")
    for index in indices:
        fd = os.open(f"{dev}/nvidia{index}", os.O_RDWR | os.O_CLOEXEC)
        os.lseek(fd, mib << 20, os.SEEK_SET)
        HELD.append(fd)


def say(text):
    print(text, flush=True)


def steps(args, until=None, each=None):
    """Print steps until the time is up, or `until` of them are done. With --beat, a heartbeat each."""
    end, n = time.monotonic() + args.seconds, 0
    while time.monotonic() < end and (until is None or n < until):
        n += 1
        say(f"step {n} loss {4.0 / (n + 1):.4f}")
        if args.beat:
            beat(args, n, deadline_s=args.beat)
        if each is not None:
            each(n)
        time.sleep(args.step)


def beat(args, step, deadline_s=10.0, queues=None, threads=None):
    """Write heartbeat.json into the run's folder, replaced atomically."""
    folder = Path(os.environ["DFLASH_RUN_DIR"])
    now = time.monotonic()
    record = {
        "version": 1,
        "pid": os.getpid(),
        "phase": "training",
        "step": step,
        "total_steps": 1000,
        "wall": time.time(),
        "mono": now,
        "phase_since": BEGUN,
        "deadline_s": deadline_s,
        "median_step_s": args.step if step else None,
        "queues": queues or {"hidden": {"depth": 1, "size": 4}},
        "threads": threads or {"drafter0": True},
        "metrics": {"loss": 4.0 / ((step or 0) + 1), "tokens_per_s": 12000.0},
    }
    aside = folder / ".heartbeat.json.new"
    with open(aside, "w") as f:
        json.dump(record, f)
        f.flush()
        os.fsync(f.fileno())
    aside.replace(folder / "heartbeat.json")


def rest(args):
    """Sleep what is left of a job that does nothing any more."""
    time.sleep(args.seconds)


def steady(args):
    """Trains, writes no heartbeat, ends with 0."""
    take_gpus()
    steps(args)


def heartbeat(args):
    """Trains and writes heartbeat.json at every step."""
    take_gpus()
    steps(args, each=lambda n: beat(args, n))


def ranks(args):
    """torchrun-shaped: a leader without GPUs, and a rank in a session of its own for each GPU. TERM to the
    leader ends the ranks; KILL to the leader leaves them behind, holding their GPUs."""
    gpus = visible_gpus() or ["0", "1"]
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    children = []
    for rank, gpu in enumerate(gpus):
        own = dict(env, LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(len(gpus)), JOB_GPU=gpu)
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", "--seconds", str(args.seconds)]
        children.append(subprocess.Popen(argv, env=own, start_new_session=True))

    def end(number, frame):
        raise SystemExit(
            128 + number
        )  # out of the wait below, which holds a lock that another wait would need

    signal.signal(signal.SIGTERM, end)
    try:
        sys.exit(max(child.wait() for child in children))
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()


def rank(args):
    """One rank of `ranks`."""
    take_gpus([os.environ["JOB_GPU"]])
    steps(args)


def rename(title):
    """What setproctitle does: the new title over argv and the environment in memory, so that
    /proc/PID/cmdline shows it and /proc/PID/environ is lost; and the thread's name by prctl."""
    with open("/proc/self/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    arg_start, env_end = int(fields[45]), int(fields[48])
    size = env_end - arg_start
    text = title.encode()[: size - 1]
    ctypes.memset(arg_start, 0, size)
    ctypes.memmove(arg_start, text, len(text))
    ctypes.CDLL(None).prctl(15, title.encode()[:15], 0, 0, 0)


def renames(args):
    """A worker in its own session that re-titles itself and loses its environment, as vLLM's do."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        take_gpus()
        rename("VLLM::Worker_TP0")
        steps(args)
        os._exit(0)
    os.waitpid(pid, 0)


def ignores_term(args):
    """Ends only by KILL."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    take_gpus()
    steps(args)


def double_forks(args):
    """A daemon's two forks: the worker's parent is gone, its session is its own; the leader stays, or goes
    with
    --leave."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            take_gpus()
            steps(args)
            os._exit(0)
        os._exit(0)
    os.wait()
    if not args.leave:
        rest(args)


def stalls(args):
    """Three steps, then silence: alive, asleep."""
    take_gpus()
    steps(args, until=3)
    rest(args)


def spins(args):
    """Three steps, then silence with a core at 100 %."""
    take_gpus()
    steps(args, until=3)
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        pass


def stops(args):
    """Three steps, then SIGSTOP to itself (state T)."""
    take_gpus()
    steps(args, until=3)
    os.kill(os.getpid(), signal.SIGSTOP)
    rest(args)


def wedges(args):
    """The threaded topology with dead drafters: their tracebacks are in the log, the queue is full, the main
    thread waits for ever, the process looks alive."""
    take_gpus()
    hidden = queue.Queue(maxsize=2)

    def drafter(n):
        hidden.get()
        time.sleep(0.2 * n)  # tracebacks written at once are mixed within a line, each time in another way
        raise AssertionError("assert torch._C._is_key_in_tls(attr_name)")

    workers = [threading.Thread(target=drafter, args=(n,), name=f"drafter{n}") for n in range(3)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        try:
            hidden.put(0, timeout=1)
        except queue.Full:
            pass
        if args.beat:
            alive = {worker.name: worker.is_alive() for worker in workers}
            beat(args, None, args.beat, {"hidden": {"depth": hidden.qsize(), "size": 2}}, alive)


def crashes(args):
    """Two steps, then an exception that nobody catches."""
    take_gpus()
    steps(args, until=2)
    raise ValueError("tap layer 61 is out of range for a target with 36 layers")


def exits(args):
    """Two steps, then exit code 3."""
    take_gpus()
    steps(args, until=2)
    sys.exit(3)


def hogs(args):
    """Takes 8 MiB after 8 MiB of memory until the kernel ends it."""
    take_gpus()
    say("step 1 loss 1.0")
    blocks = []
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        blocks.append(bytearray(os.urandom(4096) * 2048))


def progress(args):
    """tqdm-shaped: carriage returns, no newline, block characters."""
    take_gpus()
    end, n = time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        n += 1
        bar = "\u2588" * (n % 40)
        sys.stdout.write(f"\rtraining {n % 100:>3}%|{bar:<40}| {n}/1000 [00:{n % 60:02d}, loss=1.23]")
        sys.stdout.flush()
        time.sleep(args.step)
    sys.stdout.write("\n")


def floods(args):
    """50 MB in the shortest time, on both streams, then a last line."""
    line = b"x" * 120 + b"\n"
    block = line * 4096
    for n in range(args.megabytes * 1000000 // len(block)):
        os.write(2 if n % 4 == 3 else 1, block)
    say("flood is over")


ESCAPES = [
    "\x1b[2J\x1b[Hstep 1 loss 0.1",
    "\x1b]0;your terminal is mine\x07",
    "\x1b]8;;http://example.invalid/\x07click\x1b]8;;\x07",
    "\x1b[6n\x1bP+q544e\x1b\\",
    "[bold red]not markup[/bold red] [link=http://example.invalid]x[/link] [/]",
    "\x9b31m C1 \x85 next line, \u2028 line separator, \u202e right-to-left",
    "bell \x07 backspace \x08\x08\x08 nul \x00 delete \x7f",
    "half a character: ",
]


def escapes(args):
    """Terminal escape sequences, terminal markup, controls, and bytes that are no UTF-8."""
    take_gpus()
    for text in ESCAPES:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.write(b"\xff\xfe\xc3\x28 \xe2\x82\n")
    sys.stdout.buffer.flush()
    steps(args)


KINDS = [steady, heartbeat, ranks, rank, renames, ignores_term, double_forks, stalls, spins, stops, wedges]
KINDS += [crashes, exits, hogs, progress, floods, escapes]


def main():
    kinds = {kind.__name__.replace("_", "-"): kind for kind in KINDS}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=sorted(kinds))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--beat", type=float, default=0.0, help="write heartbeats with this deadline")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--stacks", action="store_true", help="write stacks at SIGUSR1, as the trainer does")
    args = parser.parse_args()
    if args.stacks:
        place = Path(os.environ["DFLASH_RUN_DIR"], f"stacks-{os.getpid()}.txt")
        HELD.append(place.open("w"))
        faulthandler.register(signal.SIGUSR1, file=HELD[-1], all_threads=True)
    kinds[args.kind](args)


if __name__ == "__main__":
    main()
