"""Xid messages of the NVIDIA driver in the kernel's log. Meanings after NVIDIA's "Xid Errors" catalogue."""

from __future__ import annotations

import re

XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")
"""`NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.`"""

HARDWARE = {
    46: "GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "row of memory retired",
    64: "row of memory could not be retired",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit memory errors",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "link training failed",
    140: "uncorrected memory error",
    143: "GPU initialisation failed",
}
"""The card, its link or its firmware."""

PROGRAM = {
    13: "graphics engine exception",
    31: "memory page fault",
    32: "invalid push buffer",
    43: "GPU stopped for a program's fault",
    45: "work of a program that ended was cleaned up",
    68: "video processor exception",
    69: "graphics engine class error",
    94: "contained memory error",
    109: "context switch timeout",
    154: "recovery action changed",
}
"""Mostly what a program did, or the end of it."""
