"""A healthy box as `doctor` reads it (Proxmox, container 200, eight H200s); single facts can be made bad."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.doctor.checks import Report, judge
from dflashctl.doctor.facts import Clock, Contact, Facts
from dflashctl.doctor.findings import Line

GIB = 2**30
DRIVER = "580.65.06"
FOLDERS = ["/workspace", "/root/dflash", "/workspace/.dflashctl"]

HOST = Host(
    name="ct200",
    engine="pct",
    container=200,
    python="/root/venv/bin/python",
    code_root="/root/dflash",
    workdir="/workspace",
    log_dir="/workspace",
    state_dir="/workspace/.dflashctl",
    gpus={"expect": 8},
)

CONTACT = Contact(
    user="root",
    address="proxmox-gpu",
    keys=("/home/anna/.ssh/id_ed25519",),
    host_key="ssh-ed25519 SHA256:abc (/home/anna/.ssh/known_hosts:3)",
    connect_s=0.2,
    latency_s=0.012,
)

GPU_TEXT = """\
GPU 00000000:{bus}:00.0
    Product Name                                       : NVIDIA H200
    Persistence Mode                                   : Enabled
    MIG Mode
        Current                                        : {mig}
        Pending                                        : Disabled
    GPU UUID                                           : {uuid}
    Minor Number                                       : {index}
    GPU Recovery Action                                : {recovery}
    PCI
        Bus                                            : 0x{bus}
        Bus Id                                         : 00000000:{bus}:00.0
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 1
                Device Max                             : 5
            Link Width
                Max                                    : 16x
                Current                                : {width}x
        Replays Since Reset                            : 0
    Fan Speed                                          : N/A
    FB Memory Usage
        Total                                          : 143771 MiB
        Used                                           : {used}
    Compute Mode                                       : Default
    ECC Mode
        Current                                        : {ecc}
        Pending                                        : Enabled
    ECC Errors
        Volatile
            SRAM Correctable                           : 0
            SRAM Uncorrectable Parity                  : 0
            DRAM Correctable                           : 3
            DRAM Uncorrectable                         : {volatile}
        Aggregate
            SRAM Uncorrectable SEC-DED                 : 0
            DRAM Uncorrectable                         : {aggregate}
            SRAM Threshold Exceeded                    : No
    Remapped Rows
        Correctable Error                              : 0
        Uncorrectable Error                            : 0
        Pending                                        : {pending}
        Remapping Failure Occurred                     : {failed}
    Temperature
        GPU Current Temp                               : 32 C
    Fabric
        State                                          : {fabric}
        Status                                         : Success
    Processes                                          : None
"""
GOOD = {
    "recovery": "None",
    "width": "16",
    "ecc": "Enabled",
    "volatile": "0",
    "aggregate": "0",
    "pending": "No",
    "failed": "No",
    "fabric": "Completed",
    "mig": "Disabled",
    "used": "0 MiB",
}


def reading(
    stdout: str = "", exit: int | None = 0, problem: str | None = None, stderr: str = ""
) -> dict[str, Any]:
    return {"exit": exit, "stdout": stdout, "stderr": stderr, "problem": problem}


MISSING = reading(exit=None, problem="missing")


def uuid(index: int) -> str:
    return f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd"


def query(count: int = 8, **gpu3: str) -> dict[str, Any]:
    """`nvidia-smi -q` of so many GPUs; keywords change single values of GPU 3."""
    head = f"\n{'=' * 14}NVSMI LOG{'=' * 14}\n\nTimestamp{' ' * 41}: Mon Nov 30 08:00:00 2026\n"
    head += f"Driver Version                                         : {DRIVER}\n"
    head += "CUDA Version                                           : 13.0\n\n"
    head += f"Attached GPUs                                          : {count}\n"
    parts = []
    for index in range(count):
        values = GOOD | (gpu3 if index == 3 else {})
        parts.append(
            GPU_TEXT.format(bus=f"{0x1B + 0x10 * index:02X}", uuid=uuid(index), index=index, **values)
        )
    return reading(head + "\n".join(parts))


def topology(**cells: str) -> dict[str, Any]:
    """`topo -m` of eight; `c05="SYS"` changes the cell of GPUs 0 and 5."""
    names = [f"GPU{index}" for index in range(8)]
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for one in range(8):
        row = [
            " X " if one == other else cells.get(f"c{min(one, other)}{max(one, other)}", "NV18")
            for other in range(8)
        ]
        lines.append("\t".join([f"GPU{one}", *row, "0-47", "0", "", "N/A"]))
    return reading("\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n")


def listed(count: int = 8) -> dict[str, Any]:
    """The inside's short query."""
    return reading("".join(f"{index}, {uuid(index)}, {DRIVER}\n" for index in range(count)))


def node(name: str, major: int, minor: int, **change: Any) -> dict[str, Any]:
    return {"name": name, "kind": "char", "major": major, "minor": minor, "usable": True, **change}


NODES = [
    *(node(f"nvidia{index}", 195, index) for index in range(8)),
    node("nvidiactl", 195, 255),
    node("nvidia-uvm", 508, 0),
]


def folder(path: str, **change: Any) -> dict[str, Any]:
    return {
        "path": path,
        "exists": True,
        "at": path,
        "uid": 0,
        "mode": 0o755,
        "writable": True,
        "read_only": False,
        "size": 2000 * GIB,
        "free": 900 * GIB,
        "inodes": 100_000_000,
        "inodes_free": 90_000_000,
        "device": 1,
        **change,
    }


def place(**change: Any) -> dict[str, Any]:
    return {
        "folders": [folder(path) for path in FOLDERS],
        "shm": folder("/dev/shm", size=64 * GIB, free=64 * GIB, device=2),
        "nodes": copy.deepcopy(NODES),
        "libraries": {"cuda": [DRIVER], "nvidia-ml": [DRIVER]},
        "memory": {"limit": None, "used": None, "oom_kills": None, "total": 256 * GIB},
        **change,
    }


CONFIG = textwrap.dedent(
    """\
    arch: amd64
    dev0: /dev/nvidia0
    hostname: ct200
    lxc.cgroup2.devices.allow: c 195:* rwm
    lxc.cgroup2.devices.allow: c 508:* rwm
    lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
    lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
    memory: 262144
    mp0: /tank/ws,mp=/workspace
    unprivileged: 1
    """
)

VERSIONS = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "safetensors": "0.6.2",
    "flash-linear-attention": "0.4.1",
    "causal-conv1d": "1.6.0",
}


def box() -> dict[str, Any]:
    """The answer of `doctor_host`."""
    outside = place(memory={"limit": 256 * GIB, "used": 20 * GIB, "oom_kills": 0, "total": None})
    for each in (*outside["folders"], outside["shm"], *outside["nodes"]):
        each["usable" if "name" in each else "writable"] = None
    for each in outside["folders"]:
        each["uid"] = 100000
    return {
        "boot_id": "b",
        "kernel": "6.14.8-2-pve",
        "uid": 0,
        "simulated": False,
        "proxmox": reading("pve-manager/9.1.1/42db4a6cf33dac83 (running kernel: 6.14.8-2-pve)\n"),
        "smi": query(),
        "topo": topology(),
        "kernel_log": {"lines": [], "from": "journalctl", "problem": None},
        "driver": DRIVER,
        "majors": {"nvidia-frontend": 195, "nvidia-uvm": 508, "nvidia-caps": 236},
        "nodes": copy.deepcopy(NODES),
        "libraries": {"cuda": [DRIVER], "nvidia-ml": [DRIVER]},
        "memory_total": 1024 * GIB,
        "staging": folder("/var/tmp", device=9),
        "python": {"exists": False, "other": "/usr/bin/python3"},
        "deploy_lock": None,
        "container": {
            "status": reading("cpus: 96\nname: ct200\npid: 4711\nstatus: running\nvmid: 200\n"),
            "config": reading(CONFIG),
            "binds": [{"key": "mp0", "source": "/tank/ws", "target": "/workspace", "holds_staging": False}],
            "lock_holders": "",
            "init": {
                "pid": 4711,
                "stat": "4711 (systemd) S 4700 4711 4711 0 -1 4194560 1 2 3\n",
                "freezer": "populated 1\nfrozen 0\n",
                "uid_map": "         0     100000      65536\n",
                "place": outside,
                "python": {"exists": True, "other": "/usr/bin/python3"},
            },
        },
    }


def inside() -> dict[str, Any]:
    """The answer of `doctor_inside`."""
    device = {"capability": [9, 0], "compute_mode": 0, "unified": 1, "ipc_events": 1}
    return {
        "boot_id": "b",
        "uid": 0,
        "executable": "/root/venv/bin/python",
        "version": [3, 12, 3],
        "prefix": "/root/venv",
        "base_prefix": "/usr",
        "limits": {
            "nofile": [1024, 1048576],
            "memlock": [8 * 2**20, 8 * 2**20],
            "nproc": [500_000, 500_000],
            "stack": [8388608, -1],
        },
        "place": place(),
        "uid_map": "         0     100000      65536\n",
        "driver": DRIVER,
        "smi": listed(),
        "torch": {
            "said": {
                "packages": {"versions": dict(VERSIONS), "executable": "/root/venv/bin/python"},
                "compiler": {"command": "/usr/bin/gcc", "found": True, "problem": "", "python": [3, 12]},
                "cuda": {
                    "problem": None,
                    "error": None,
                    "version": "13.0",
                    "devices": [dict(device) for _ in range(8)],
                    "peers": [[True] * 8 for _ in range(8)],
                },
                "torch": {
                    "problem": None,
                    "version": "2.11.0+cu130",
                    "cuda": "13.0",
                    "available": True,
                    "count": 8,
                    "architectures": ["sm_80", "sm_90", "sm_100", "compute_120"],
                    "warnings": [],
                    "import_s": 4.2,
                },
            },
            "problem": None,
            "stderr": "",
            "took_s": 5.0,
        },
    }


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `data` with the value at `a/b/0/c` replaced."""
    made = copy.deepcopy(data)
    *parents, last = path.split("/")
    at: Any = made
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[int(last) if isinstance(at, list) else last] = value
    return made


def facts(
    changes: dict[str, Any] | None = None,
    *,
    host: dict[str, Any] | None = None,
    contact: dict[str, Any] | None = None,
    **whole: Any,
) -> Facts:
    """The healthy box with changes: {"box/driver": ..., "inside/version": ...}; keywords replace fields."""
    both = {"box": box(), "inside": inside()}
    for path, value in (changes or {}).items():
        both = put(both, path, value)
    made: dict[str, Any] = {
        "host": HOST.model_copy(update=host or {}),
        "contact": Contact(**{**CONTACT.__dict__, **(contact or {})}),
        "clocks": {"host": Clock(1000.1, 1000.0, 1000.3), "inside": Clock(1001.1, 1001.0, 1001.3)},
        **both,
        **whole,
    }
    return Facts(**made)


def line(report: Report, name: str) -> Line:
    (found,) = [each for each in report.lines if each.name == name]
    return found


def judged(name: str, changes: dict[str, Any] | None = None, **how: Any) -> Line:
    """The line of one check on the healthy box with changes."""
    return line(judge(facts(changes, **how)), name)
