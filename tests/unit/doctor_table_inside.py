"""What trips the lines of `doctor` about GPUs, room and software; a part of doctor_table.py's table."""

from __future__ import annotations

from typing import Any

from doctor_kit import FOLDERS, GIB, HOST, MISSING, folder, listed, query, reading, topology, uuid

INIT = "box/container/init"
OUTSIDE = f"{INIT}/place"
SAID = "inside/torch/said"
LOG = "box/kernel_log/lines"
XID79 = "Nov 30 07:12:01 pve kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
NO_ECC = reading(query()["stdout"].replace("Uncorrectable", "Nothing"))
OLD_DRIVER = reading(query()["stdout"].replace("GPU Recovery Action ", "GPU Something Else  "))
XID31 = "[  12.5] NVRM: Xid (PCI:0000:1b:00): 31, pid=812, name=python, Ch 00000008, intr 00000000. MMU Fault"
EXPANDABLE = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


NO_TORCH = {
    f"{SAID}/packages/versions/torch": None,
    f"{SAID}/torch": {"problem": "ModuleNotFoundError: No module named 'torch'"},
}
BROKEN_CPU_TORCH = {
    f"{SAID}/packages/versions/torch": "2.13.0+cpu",
    f"{SAID}/torch": {"problem": "ImportError: libgomp.so.1"},
}
NO_GPUS = HOST.gpus.model_copy(update={"expect": 0})


def cut(pairs: list[tuple[int, int]]) -> list[list[bool]]:
    return [
        [(one, other) not in pairs and (other, one) not in pairs for other in range(8)] for one in range(8)
    ]


def bridged() -> dict[str, Any]:
    """Two of eight cards on a bridge."""
    return reading(topology(c01="NV4")["stdout"].replace("NV18", "SYS"))


def versions(**change: Any) -> dict[str, Any]:
    names = {name.replace("_", "-"): value for name, value in change.items()}
    return {f"{SAID}/packages/versions/{name}": value for name, value in names.items()}


def compiler(**change: Any) -> dict[str, Any]:
    return {f"{SAID}/compiler/{name}": value for name, value in change.items()}


def first_folder(**change: Any) -> dict[str, Any]:
    return {"inside/place/folders/0": folder(FOLDERS[0], **change)}


# As in doctor_table.py: check, status, changes of the healthy facts, words that must be told, other changes
INSIDE: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    # --- GPUs
    (
        "NVML",
        "failure",
        {"box/smi": reading("Failed to initialize NVML: Driver/library version mismatch\n", 18)},
        "reboot",
        {},
    ),
    ("NVML", "failure", {"box/smi": MISSING}, "there is no nvidia-smi", {}),
    ("NVML", "failure", {"box/smi": reading(exit=None, problem="timeout")}, "hangs in the driver", {}),
    ("NVML", "failure", {"box/smi": query(used="GPU requires reset")}, "GPU 3: requires a reset", {}),
    (
        "NVML",
        "ok",
        {
            "box/smi": query()
            | {
                "exit": 14,
                "stdout": query()["stdout"] + "WARNING: infoROM is corrupted at gpu 0000:C1:00.0\n",
            }
        },
        "8 GPUs",
        {},
    ),
    (
        "NVML",
        "failure",
        {
            "box/smi": query(7)
            | {
                "exit": 15,
                "stdout": "Unable to determine the device handle for GPU3: 0000:4B:00.0: GPU is lost.\n"
                + query(7)["stdout"],
            }
        },
        "GPU is lost",
        {},
    ),
    (
        "NVML inside",
        "failure",
        {"inside/smi": reading("Failed to initialize NVML: Unknown Error\n", 255)},
        "the host's is fine",
        {},
    ),
    (
        "NVML inside",
        "failure",
        {"inside/smi": MISSING, "box/smi": MISSING},
        "mend the host's driver first",
        {},
    ),
    ("count", "failure", {"box/smi": query(7)}, "7 of 8 GPUs", {}),
    (
        "count",
        "warning",
        {},
        "8 GPUs, 7 expected",
        {"host": {"gpus": HOST.gpus.model_copy(update={"expect": 7})}},
    ),
    ("count", "failure", {"inside/smi": listed(6)}, "not seen inside: GPU 6, GPU 7", {}),
    (
        "count",
        "failure",
        {},
        "missing: GPU-other; not named there: GPU-00000007",
        {"host": {"gpus": HOST.gpus.model_copy(update={"uuids": [*map(uuid, range(7)), "GPU-other"]})}},
    ),
    (
        "count",
        "warning",
        {},
        "not named in hosts.ct200.gpus.uuids: GPU-00000007",
        {"host": {"gpus": HOST.gpus.model_copy(update={"uuids": [*map(uuid, range(7))]})}},
    ),
    (
        "count",
        "ok",
        {},
        "each with its UUID",
        {"host": {"gpus": HOST.gpus.model_copy(update={"uuids": [*map(uuid, range(8))]})}},
    ),
    ("count", "not known", {"box/smi": MISSING}, "see NVML", {}),
    ("ECC", "failure", {"box/smi": query(volatile="2")}, "GPU 3: 2 uncorrectable errors", {}),
    ("ECC", "failure", {"box/smi": query(pending="Yes")}, "GPU 3: a row waits to be replaced", {}),
    (
        "ECC",
        "failure",
        {"box/smi": query(pending="Yes", failed="Yes")},
        "GPU 3: a row could not be replaced",
        {},
    ),
    ("ECC", "warning", {"box/smi": query(aggregate="5")}, "GPU 3: 5 uncorrectable errors in its life", {}),
    ("ECC", "warning", {"box/smi": query(ecc="Disabled")}, "nvidia-smi -e 1", {}),
    ("ECC", "not known", {"box/smi": NO_ECC}, "count no memory errors", {}),
    (
        "Xid",
        "failure",
        {LOG: [XID79.replace("3b", "ff")]},
        "Xid 79 (GPU has fallen off the bus) at 0000:ff",
        {},
    ),
    ("Xid", "failure", {LOG: [XID79], "box/smi": query(recovery="Reset")}, "Xid 79", {}),
    ("Xid", "warning", {LOG: [XID79]}, "0000:3b:00 (1x)", {}),
    ("Xid", "failure", {LOG: [XID79], "box/smi": OLD_DRIVER}, "dies or hangs", {}),
    ("Xid", "warning", {LOG: [XID31, XID31]}, "Xid 31 (memory page fault) at 0000:1b:00 (2x)", {}),
    ("Xid", "failure", {LOG: [XID31], "box/smi": query(recovery="Reset")}, "recovery of GPU 3", {}),
    ("Xid", "ok", {"box/kernel_log/from": "dmesg", LOG: ["NVRM: loading 580"]}, "still holds", {}),
    ("Xid", "not known", {"box/kernel_log/problem": "dmesg: not permitted"}, "not permitted", {}),
    ("PCIe", "warning", {"box/smi": query(width="8")}, "GPU 3: x8 of x16", {}),
    ("PCIe", "not known", {"box/smi": reading(query()["stdout"].replace("16x", "N/A"))}, "no link width", {}),
    ("NVLink", "failure", {"box/smi": query(fabric="In Progress")}, "nvidia-fabricmanager", {}),
    ("NVLink", "warning", {"box/topo": topology(c05="SYS")}, "not 0-5: SYS", {}),
    ("NVLink", "warning", {"box/topo": topology(c12="NV17")}, "1-2: NV17", {}),
    (
        "NVLink",
        "ok",
        {"box/topo": reading(topology()["stdout"].replace("NV18", "PHB"))},
        "over PCIe (PHB)",
        {},
    ),
    ("NVLink", "ok", {"box/topo": bridged()}, "1 of 28 pairs joined by NV4, the others over PCIe", {}),
    ("NVLink", "ok", {"box/smi": query(1)}, "alone", {}),
    ("NVLink", "not known", {"box/topo": MISSING}, "no matrix", {}),
    ("P2P", "warning", {f"{SAID}/cuda/peers": cut([(0, 5), (3, 4)])}, "between 0-5, 3-4 (2 of 28 pairs)", {}),
    ("P2P", "ok", {f"{SAID}/cuda/peers": [[True]]}, "one GPU alone", {}),
    ("P2P", "failure", {f"{SAID}/cuda": {"error": "CUDA_ERROR_UNKNOWN"}}, "nvidia-uvm: missing", {}),
    ("P2P", "not known", {f"{SAID}/cuda": {"problem": "libcuda.so.1: cannot open"}}, "libcuda.so.1", {}),
    ("P2P", "not known", {"inside/torch": None}, "no Python of runs", {}),
    ("P2P", "not known", {"box/simulated": True}, "simulated", {}),
    ("CUDA IPC", "failure", {}, "take expandable_segments out", {"host": EXPANDABLE}),
    (
        "CUDA IPC",
        "failure",
        {f"{SAID}/cuda/devices/4/compute_mode": 3},
        "GPU 4 is in compute mode Exclusive",
        {},
    ),
    ("CUDA IPC", "failure", {f"{SAID}/cuda/devices/4/ipc_events": 0}, "GPU 4 cannot share", {}),
    ("CUDA IPC", "failure", {"box/smi": query(mig="Enabled")}, "MIG is on: GPU 3", {}),
    # --- room
    ("/dev/shm", "failure", {"inside/place/shm/size": 64 * 2**20}, "bus error", {}),
    ("/dev/shm", "failure", {"inside/place/shm": folder("/dev/shm", exists=False)}, "it is not there", {}),
    ("/dev/shm", "warning", {"inside/place/shm/size": 900 * 2**20}, "remount", {}),
    ("/dev/shm", "warning", {"inside/place/shm/free": 2**20}, "ls -la /dev/shm", {}),
    ("disk", "failure", first_folder(free=GIB // 2, device=3), "512 MiB of 2.0 TiB", {}),
    ("disk", "warning", first_folder(free=5 * GIB, device=3), "5.0 GiB of 2.0 TiB free at /workspace", {}),
    ("disk", "warning", {"box/staging": folder("/var/tmp", free=2 * GIB)}, "/var/tmp (host)", {}),
    ("disk", "not known", {"inside/place/folders": [], "box/staging": None}, "no folder", {}),
    ("inodes", "failure", first_folder(inodes_free=10, device=3), "10 of 100,000,000 inodes", {}),
    ("inodes", "warning", first_folder(inodes_free=2000, device=3), "2,000 of", {}),
    ("folders", "failure", first_folder(read_only=True), "/workspace is mounted read-only", {}),
    ("folders", "failure", first_folder(uid=65534, writable=False), "chown -R 100000:100000", {}),
    ("folders", "failure", first_folder(uid=1000, writable=False), "belongs to uid 1000", {}),
    (
        "folders",
        "failure",
        first_folder(at="/", exists=False, writable=False),
        "/ (where /workspace would be made)",
        {},
    ),
    (
        "folders",
        "failure",
        {"inside/place/folders/0": {"path": "/w", "problem": "Stale file handle"}},
        "Stale",
        {},
    ),
    ("memory", "failure", {f"{OUTSIDE}/memory/limit": GIB}, "pct set 200 -memory", {}),
    ("memory", "warning", {f"{OUTSIDE}/memory/oom_kills": 2}, "killed 2 for lack of memory", {}),
    ("memory", "warning", {f"{OUTSIDE}/memory/used": 250 * GIB}, "may be killed", {}),
    ("memory", "warning", {f"{OUTSIDE}/memory/limit": 32 * GIB}, "each of 8 GPUs wants about 8.0 GiB", {}),
    (
        "memory",
        "not known",
        {f"{OUTSIDE}/memory": {}, "inside/place/memory": {}, "box/memory_total": None},
        "neither a limit nor the memory",
        {},
    ),
    ("ulimits", "failure", {"inside/limits/nofile": [256, 512]}, "Too many open files", {}),
    ("ulimits", "warning", {"inside/limits/nofile": [1024, 2048]}, "open files 2,048", {}),
    ("ulimits", "warning", {"inside/limits/nproc": [500, 500]}, "processes 500", {}),
    ("ulimits", "ok", {"inside/limits/nofile": [1024, -1]}, "open files unlimited", {}),
    ("ulimits", "not known", {"inside/limits": {}}, "could not be read", {}),
    # --- software
    ("Python", "failure", {"inside/version": [3, 9, 2]}, "3.11 or newer", {}),
    ("Python", "failure", {f"{INIT}/python/exists": False}, "python3 -m venv /root/venv", {}),
    ("Python", "failure", {f"{INIT}/python/exists": False}, "there is no /root", {"inside": None}),
    (
        "Python",
        "failure",
        {f"{INIT}/python": {"exists": False, "broken": "leads to /usr/bin/python3.10, which is not there"}},
        "venv --clear /root/venv",
        {},
    ),
    (
        "Python",
        "failure",
        {f"{INIT}/python": {"exists": False, "broken": "is not executable"}},
        "/root/venv/bin/python is not executable",
        {"inside": None},
    ),
    ("torch", "failure", versions(torch="2.12.0"), "two of them are there", {}),
    ("torch", "ok", versions(torch="2.11.0"), "sees 8 GPUs", {}),
    ("Python", "failure", {}, "does not answer: boom", {"inside": None, "inside_problem": "boom"}),
    ("Python", "ok", {"inside/base_prefix": "/root/venv"}, "the system’s own", {}),
    ("packages", "failure", versions(torch=None), "not installed: torch", {}),
    (
        "packages",
        "failure",
        versions(torch=None, safetensors=None),
        "/root/venv/bin/python -m pip install torch safetensors",
        {},
    ),
    ("packages", "failure", versions(torch="2.9.1"), "at least torch 2.11", {}),
    (
        "packages",
        "failure",
        versions(torch="2.9.1"),
        "/root/venv/bin/python -m pip install 'torch>=2.11'",
        {},
    ),
    ("packages", "failure", versions(transformers="5.2.0"), "at least transformers 5.17", {}),
    ("packages", "warning", versions(triton=None), "torch.compile has no back end", {}),
    (
        "packages",
        "warning",
        versions(flash_linear_attention=None, causal_conv1d=None),
        "half their speed",
        {},
    ),
    ("packages", "failure", {f"{SAID}/packages": {}, "inside/torch/problem": "timeout"}, "hangs", {}),
    ("compiler", "failure", compiler(command=None, found=False), "apt-get install gcc libc6-dev", {}),
    ("compiler", "failure", compiler(command="gcc-13", found=False), "CC names gcc-13", {}),
    (
        "compiler",
        "failure",
        compiler(problem="<stdin>:3:10: fatal error: Python.h: No such file or directory"),
        "python3.12-dev",
        {},
    ),
    (
        "compiler",
        "failure",
        compiler(problem="<stdin>:1:10: fatal error: stdlib.h: No such file or directory"),
        "install libc6-dev",
        {},
    ),
    ("compiler", "ok", compiler(found=False) | {f"{SAID}/torch/cuda": None}, "not needed", {}),
    ("compiler", "failure", compiler(command=None, found=False) | NO_TORCH, "apt-get install gcc", {}),
    ("compiler", "ok", compiler(found=False) | BROKEN_CPU_TORCH, "this torch is a build for CPUs", {}),
    ("compiler", "ok", compiler(found=False), "no GPU is expected", {"host": {"gpus": NO_GPUS}}),
    ("compiler", "not known", {f"{SAID}/compiler": {}}, "see packages", {}),
    ("torch", "failure", {f"{SAID}/torch": {"problem": "ImportError: libcudnn.so.9"}}, "libcudnn.so.9", {}),
    ("torch", "failure", {f"{SAID}/torch/cuda": None}, "cannot use the 8 GPUs", {}),
    ("torch", "ok", {f"{SAID}/torch/cuda": None, "box/simulated": True}, "are simulated", {}),
    (
        "torch",
        "failure",
        {f"{SAID}/torch/count": 0, f"{SAID}/cuda/error": "CUDA_ERROR_NO_DEVICE"},
        "see device nodes",
        {},
    ),
    (
        "torch",
        "failure",
        {f"{SAID}/torch/count": 0, f"{SAID}/torch/warnings": ["driver too old"]},
        "driver too old",
        {},
    ),
    ("torch", "failure", {f"{SAID}/torch/count": 6}, "sees 6 of 8 GPUs", {}),
    ("torch", "failure", {f"{SAID}/torch/architectures": ["sm_70", "sm_80"]}, "no code for sm_90", {}),
    ("torch", "ok", {f"{SAID}/torch/architectures": ["sm_70", "compute_70"]}, "sees 8 GPUs", {}),
    (
        "torch",
        "failure",
        {f"{SAID}/torch": {}, "inside/torch/problem": "timeout"},
        "did not answer within 5.0 s",
        {},
    ),
    (
        "torch",
        "failure",
        {
            f"{SAID}/torch": {},
            "inside/torch/problem": "its process ended with signal 11",
            "inside/torch/stderr": "a\nboom",
        },
        "signal 11: boom",
        {},
    ),
]
