"""A command on a disk that is small enough to be filled: a tmpfs in a mount namespace of its own."""

from __future__ import annotations

from pathlib import Path

SCRIPT = (
    'mount -t tmpfs -o "size=$1" tmpfs "$2" || exit 99; disk=$2; shift 2; "$@" >"$disk/log" 2>&1; code=$?; '
    'cp -r "$disk/." "$disk.after"; exit $code'
)


def on_small_disk(disk: Path, size: str, command: list[str]) -> list[str]:
    """`command` with its log (`log`) and whatever it writes below `disk` on the small disk. What lay there
    at its end is copied to `<disk>.after`.

    Args:
        size: as for mount: 16m.
    """
    disk.mkdir(parents=True, exist_ok=True)
    return [
        *("unshare", "--user", "--map-root-user", "--mount"),
        *("sh", "-c", SCRIPT, "sh", size, str(disk), *command),
    ]
