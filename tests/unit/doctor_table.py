"""What trips each line of `doctor`: single facts of the healthy box of doctor_kit.py made bad.

Here the connection, the container and its devices; the rest is in doctor_table_inside.py."""

from __future__ import annotations

from typing import Any

from doctor_kit import CONFIG, DRIVER, MISSING, NODES, reading
from doctor_table_inside import INIT, INSIDE

from dflashctl.doctor.facts import Clock

V1_RULES = CONFIG.replace("cgroup2", "cgroup")
NO_UVM_RULE = CONFIG.replace("lxc.cgroup2.devices.allow: c 508:* rwm\n", "")
ALL_ALLOWED = NO_UVM_RULE.replace("allow: c 195:* rwm", "allow: a")
READ_ONLY = CONFIG.replace("508:* rwm", "508:* r")
NOTHING_GIVEN = "\n".join(row for row in CONFIG.splitlines() if not row.startswith(("dev0", "lxc.")))


# check, status, changes of the healthy facts, words that must be told, other changes
TABLE: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    # --- connection
    (
        "ssh key",
        "failure",
        {},
        "ssh -v",
        {"contact": {"trouble": "not let in", "what": "no", "next": "ssh -v"}},
    ),
    ("ssh key", "failure", {}, "no such key", {"contact": {"trouble": "setting", "what": "no such key"}}),
    ("ssh key", "warning", {}, "chmod 600 /k", {"contact": {"open_keys": ("/k",)}}),
    ("ssh key", "not known", {}, "id_ed25519", {"contact": {"trouble": "no contact"}}),
    (
        "known_hosts",
        "failure",
        {},
        "a stranger",
        {"contact": {"trouble": "key unknown", "what": "new", "next": "trust"}},
    ),
    (
        "known_hosts",
        "failure",
        {},
        "set up anew",
        {"contact": {"trouble": "key changed", "what": "other", "next": "see"}},
    ),
    ("known_hosts", "not known", {}, "SHA256:abc", {"contact": {"trouble": "no contact"}}),
    ("ssh", "failure", {}, "timed out", {"contact": {"trouble": "no contact", "what": "timed out"}}),
    ("ssh", "warning", {}, "450.0 ms", {"contact": {"latency_s": 0.45}}),
    ("ssh", "not known", {}, "log-in failed", {"contact": {"trouble": "not let in"}}),
    ("clock", "warning", {}, "host's clock is 12 s ahead", {"clocks": {"host": Clock(112.0, 99.0, 100.0)}}),
    (
        "clock",
        "warning",
        {},
        "container's clock is 30 s behind",
        {"clocks": {"inside": Clock(69.0, 99.0, 100.0)}},
    ),
    ("clock", "failure", {}, "certificates", {"clocks": {"host": Clock(1e6, 99.0, 100.0)}}),
    (
        "clock",
        "ok",
        {},
        "agrees",
        {"clocks": {"host": Clock(90.0, 80.0, 100.0)}},
    ),  # a slow answer is no offset
    ("clock", "not known", {}, "no clock", {"clocks": {}}),
    ("host", "failure", {}, "python3", {"box": None, "box_problem": "cannot run python3 there"}),
    (
        "host",
        "not known",
        {},
        "lost",
        {"box": None, "box_problem": "lost", "contact": {"trouble": "no contact"}},
    ),
    # --- container
    (
        "Proxmox",
        "warning",
        {"box/proxmox": reading("pve-manager/7.4-17/513c62be (running)\n")},
        "upgrade",
        {},
    ),
    ("Proxmox", "warning", {"box/proxmox": reading("pve-manager/11.0.2/x (running)\n")}, "11.0.2", {}),
    ("Proxmox", "not known", {"box/proxmox": MISSING}, "no pveversion", {}),
    ("state", "failure", {"box/container/status": reading("status: stopped\n")}, "pct start 200", {}),
    ("state", "failure", {"box/container/status": MISSING}, "no Proxmox host", {}),
    (
        "state",
        "failure",
        {
            "box/container/status": reading(
                "", 2, None, "Configuration file 'nodes/pve1/lxc/200.conf' does not exist\n"
            )
        },
        "no container 200 on node pve1",
        {},
    ),
    (
        "state",
        "failure",
        {"box/container/status": reading("", 255, None, "please run as root\n")},
        "ssh.sudo",
        {},
    ),
    ("freezer", "failure", {f"{INIT}/freezer": "populated 1\nfrozen 1\n"}, "pct resume 200", {}),
    ("freezer", "failure", {f"{INIT}/freezer": "FROZEN\n"}, "frozen", {}),
    ("freezer", "failure", {f"{INIT}/stat": "4711 (a ) b) T 1 2\n"}, "frozen", {}),
    ("freezer", "not known", {INIT: None}, "could not be looked at", {}),
    ("locks", "warning", {"box/container/config": reading("lock: backup\n" + CONFIG)}, "pct unlock 200", {}),
    ("locks", "warning", {"box/container/lock_holders": "pid 9: vzdump 200"}, "vzdump 200", {}),
    (
        "locks",
        "warning",
        {"box/deploy_lock": {"who": "anna@laptop", "held_s": 12.0}},
        "anna@laptop for 12 s",
        {},
    ),
    ("locks", "not known", {"box/container/config": reading("", 255)}, "could not be read", {}),
    ("users", "failure", {f"{INIT}/uid_map": "0 0 4294967295\n"}, "root in it is root", {}),
    (
        "users",
        "failure",
        {"box/container/config": reading(CONFIG.replace("unprivileged: 1\n", ""))},
        "says privileged, but root in it is uid 100000",
        {},
    ),
    (
        "users",
        "warning",
        {
            "box/container/config": reading(CONFIG.replace("unprivileged: 1\n", "")),
            f"{INIT}/uid_map": "0 0 4294967295\n",
        },
        "reach its devices",
        {},
    ),
    ("users", "warning", {f"{INIT}/uid_map": "0 100000 1000\n"}, "only 1,000 ids", {}),
    ("users", "not known", {f"{INIT}/uid_map": ""}, "could not be read", {}),
    ("mounts", "failure", {"box/container/binds/0/holds_staging": True}, "set staging_dir", {}),
    ("mounts", "ok", {"box/container/binds": []}, "no folder", {}),
    ("mounts", "not known", {"box/container/config": reading("", 255)}, "could not be read", {}),
    # --- devices
    ("driver", "failure", {"inside/place/libraries": {"cuda": ["570.1.2"]}}, "--no-kernel-module", {}),
    ("driver", "failure", {"box/libraries": {"cuda": ["570.1.2"]}}, "reboot the host", {}),
    ("driver", "failure", {"inside/place/libraries": {}}, "libcuda.so.1", {}),
    ("driver", "failure", {"inside/place/libraries": {"cuda": [DRIVER]}}, "libnvidia-ml.so is missing", {}),
    ("driver", "failure", {"box/driver": None, "box/smi": MISSING, "box/nodes": []}, "no NVIDIA driver", {}),
    ("driver", "not known", {"box/driver": None, "box/smi": MISSING}, "could not be read", {}),
    ("nvidia-uvm", "failure", {"box/majors": {"nvidia-frontend": 195}}, "modprobe nvidia-uvm", {}),
    ("nvidia-uvm", "failure", {"box/nodes": NODES[:-1]}, "the host has no /dev/nvidia-uvm", {}),
    ("nvidia-uvm", "failure", {"inside/place/nodes": NODES[:-1]}, "runs have no /dev/nvidia-uvm", {}),
    (
        "device nodes",
        "failure",
        {"inside/place/nodes": NODES[1:]},
        "missing where runs live: /dev/nvidia0",
        {},
    ),
    (
        "device nodes",
        "failure",
        {"inside/place/nodes/9": {"name": "nvidia-uvm", "kind": "file", "major": None, "usable": True}},
        "a plain file: /dev/nvidia-uvm",
        {},
    ),
    (
        "device nodes",
        "failure",
        {"inside/place/nodes/2/usable": False},
        "may not be opened: /dev/nvidia2",
        {},
    ),
    (
        "device majors",
        "failure",
        {"inside/place/nodes/9/major": 511},
        "/dev/nvidia-uvm has 511, the driver 508",
        {},
    ),
    ("device majors", "failure", {"inside/place/nodes/0/major": 194}, "/dev/nvidia0 has 194", {}),
    ("device majors", "not known", {"box/majors": {}}, "/proc/devices", {}),
    ("cgroup rules", "failure", {"box/container/config": reading(NO_UVM_RULE)}, "allow: c 508:* rwm", {}),
    (
        "cgroup rules",
        "failure",
        {"box/container/config": reading(V1_RULES)},
        "has no effect on this host",
        {},
    ),
    ("cgroup rules", "failure", {"box/container/config": reading(NOTHING_GIVEN)}, "no GPU is given", {}),
    ("cgroup rules", "ok", {"box/container/config": reading(ALL_ALLOWED)}, "all may be opened", {}),
    ("cgroup rules", "failure", {"box/container/config": reading(READ_ONLY)}, "allow: c 508:* rwm", {}),
    ("cgroup rules", "not known", {"box/container/config": reading("", 255)}, "could not be read", {}),
    *INSIDE,
]
