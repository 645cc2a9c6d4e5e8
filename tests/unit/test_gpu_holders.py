"""The simulated GPUs: who counts as a holder, and whose memory and time are counted."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

from gpu_standin_kit import Lab, wait_for
from gpu_standin_kit import lab as lab

from dflashctl.lab.gpu import HOOK_DIR, change, load


def test_holders_are_processes_with_the_device_open(lab: Lab) -> None:
    declared = lab.holder("1,3", DFLASH_LAB_GPU_MIB="1634")
    plain = lab.holder("3")
    by_offset = lab.holder(
        "", f"os.lseek(os.open({str(lab.dir / 'dev/nvidia7')!r}, os.O_RDWR), 900 << 20, 0)"
    )
    sh = lab.start(["sh", "-c", f"exec 9<>{lab.dir}/dev/nvidia6; echo up; exec sleep 60"])
    assert sh.stdout is not None and sh.stdout.readline() == "up\n"
    uuids = {g.index: g.uuid for g in load(lab.dir).gpus}
    done = lab.smi("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv,noheader,nounits")
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"{declared.pid}, 1634, {uuids[1]}",
            f"{declared.pid}, 1634, {uuids[3]}",
            f"{plain.pid}, 518, {uuids[3]}",
            f"{by_offset.pid}, 900, {uuids[7]}",
            f"{sh.pid}, 518, {uuids[6]}",
        ]
    )
    assert lab.memory() == [0, 1634, 0, 2152, 4, 0, 518, 900]
    for p in (declared, plain, by_offset, sh):
        p.kill()
        p.wait(10)
    assert lab.memory() == [0, 0, 0, 0, 4, 0, 0, 0]


def test_a_renamed_holder_shows_its_new_name(lab: Lab) -> None:
    sh = lab.start(["bash", "-c", f"exec -a 'VLLM::Worker, TP0' sleep 60 9<>{lab.dir}/dev/nvidia0"])
    query = ("--query-compute-apps=pid,process_name", "--format=csv,noheader")
    wait_for(lambda: lab.smi(*query).stdout == f"{sh.pid}, VLLM::Worker, TP0\n")


SHOW_OPEN = """
import os
for n in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{n}"):
        print(os.readlink(f"/proc/self/fd/{n}"))
"""


def test_hook_opens_what_cuda_would(lab: Lab) -> None:
    uuid = load(lab.dir).gpu(5).uuid

    def opened(**env: str) -> list[str]:
        p = lab.start([sys.executable, "-c", SHOW_OPEN], PYTHONPATH=str(HOOK_DIR), **env)
        assert p.stdout is not None
        return sorted(re.findall(r"/nvidia(\d)$", p.stdout.read(), re.MULTILINE))

    assert opened() == []
    for visible, indices in (
        ("", []),
        ("0,2", ["0", "2"]),
        (f"{uuid[:12]},1", ["1", "5"]),
        ("3,-1,4", ["3"]),
        ("1,1", []),
        ("9", []),
    ):
        assert opened(CUDA_VISIBLE_DEVICES=visible) == indices, visible


def test_a_child_that_is_no_python_holds_nothing(lab: Lab) -> None:
    code = "import subprocess; c = subprocess.Popen(['sleep', '60']); import atexit; print(c.pid, flush=True)"
    p = lab.start(
        [sys.executable, "-c", code + "; import time; time.sleep(60)"],
        CUDA_VISIBLE_DEVICES="4",
        PYTHONPATH=str(HOOK_DIR),
    )
    assert p.stdout is not None
    child = int(p.stdout.readline())
    try:
        done = lab.smi("--query-compute-apps=pid", "--format=csv,noheader")
        assert done.stdout == f"{p.pid}\n"
    finally:
        os.kill(child, signal.SIGKILL)


def test_utilization_is_the_holders_cpu_time(lab: Lab) -> None:
    lab.holder(
        "0",
        "import threading\n"
        "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    )
    lab.holder("1", DFLASH_LAB_GPU_UTIL="97")
    lab.holder("2")

    def busy() -> list[int]:
        done = lab.smi("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
        return [int(x) for x in done.stdout.split()]

    # The machine is shared: a spinning process gets some CPU, not always all of one.
    wait_for(lambda: busy()[0] >= 10)
    assert busy()[1] == 97 and busy()[2] <= 2


def test_memory_lingers_after_a_kill_but_not_after_a_close(lab: Lab) -> None:
    def killed(gpu: int, linger_s: float) -> None:
        change(lab.dir, lambda box: setattr(box, "linger_s", linger_s))
        victim = lab.holder(str(gpu), DFLASH_LAB_GPU_MIB="3000")
        assert lab.memory()[gpu] == 3000
        victim.kill()
        victim.wait(30)

    killed(6, 3600.0)
    assert lab.memory()[6] == 3000
    apps = lab.smi("--query-compute-apps=pid", "--format=csv,noheader").stdout
    assert apps == "", "the memory is taken, but there is no process to name"
    began = time.monotonic()
    killed(7, 1.0)
    wait_for(lambda: lab.memory()[7] == 0)
    assert time.monotonic() - began >= 1.0
    closer = lab.start(
        [
            sys.executable,
            "-c",
            f"import os, time; fd = os.open({str(lab.dir / 'dev/nvidia5')!r}, os.O_RDWR)\n"
            "print('up', flush=True)\n"
            f"while not os.path.exists({str(lab.dir / 'close')!r}): time.sleep(0.02)\n"
            "os.close(fd); print('shut', flush=True); time.sleep(60)",
        ]
    )
    assert closer.stdout is not None and closer.stdout.readline() == "up\n"
    assert lab.memory()[5] == 518
    (lab.dir / "close").touch()
    assert closer.stdout.readline() == "shut\n"
    assert lab.memory()[5] == 0


def test_leaked_memory_has_no_holder(lab: Lab) -> None:
    change(lab.dir, lambda box: setattr(box.gpu(3), "leaked_mib", 40960))
    assert lab.memory()[3] == 40960
    assert lab.smi("--query-compute-apps=pid", "--format=csv,noheader").stdout == ""
