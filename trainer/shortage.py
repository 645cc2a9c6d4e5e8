"""Whether an error is too little memory, of a GPU or of the host, and what it says of sizes.

Runs without torch; which keys of a recipe take less is `run/out_of_memory.py`'s to say.
"""

from __future__ import annotations

import errno
import os
import traceback
from dataclasses import dataclass

from trainer.errors import OutOfMemory
from trainer.failures import by_name

ON_HOST = "can't allocate memory"  # of torch's CPU allocator, which has no exception of its own
BY_SYSTEM = os.strerror(errno.ENOMEM)  # what a library passes on that maps a file
ADVICE_OF_TORCH = ("If reserved but unallocated", "See documentation for Memory Management")
# What a command does before its options count: it brings models into memory.
LOADING = ("load_target", "load_drafter", "read_tensors", "drafter_of", "ends_of", "make_target")


@dataclass(frozen=True)
class Relief:
    """What makes a command take less memory."""

    command: str
    working: str
    loading: str = "take a GPU, machine or container with more memory, or end what else is using it"


OF_ANY = Relief("", Relief.loading)


def is_shortage(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host was asked for that is not there."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    # Libraries in Rust have but one exception, or raise plain Exception.
    if not kinds & {"RuntimeError", "SafetensorError", "OSError"} and type(error) is not Exception:
        return False
    lines = str(error).splitlines()
    return any(_by_host(line) or by_name()["cuda-oom"].finds(line) for line in lines)


def _by_host(line: str) -> bool:
    return ON_HOST in line or BY_SYSTEM in line


def sizes(error: BaseException) -> str:
    """What the allocator says of sizes: its first line, without its own advice."""
    first = (str(error).strip().splitlines() or ["memory could not be allocated"])[0]
    for advice in ADVICE_OF_TORCH:
        first = first.partition(advice)[0].rstrip()
    return first[first.find(ON_HOST) :] if ON_HOST in first else first


def of_the_host(error: BaseException) -> bool:
    """Whose memory an error that `is_shortage` is about: the host's, or a GPU's."""
    return _by_host(str(error)) or isinstance(error, MemoryError | OSError)


def of_command(error: BaseException, relief: Relief) -> OutOfMemory | None:
    """The message of a command that has no recipe; None for an error that is no shortage."""
    if not is_shortage(error):
        return None
    loading = any(frame.name in LOADING for frame in traceback.extract_tb(error.__traceback__))
    next = relief.loading if loading else relief.working
    return OutOfMemory(f"out of memory: {sizes(error)}", where=relief.command, next=next)
