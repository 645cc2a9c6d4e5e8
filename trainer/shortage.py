"""Whether an error is too little memory, of a GPU or of the host, and what it says of sizes.

Runs without torch; which keys of a recipe take less is `run/out_of_memory.py`'s to say.
"""

from __future__ import annotations

from trainer.failures import by_name

ON_HOST = "can't allocate memory"  # of torch's CPU allocator, which has no exception of its own
ADVICE_OF_TORCH = ("If reserved but unallocated", "See documentation for Memory Management")


def is_shortage(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host was asked for that is not there."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return True
    if not isinstance(error, RuntimeError):
        return False
    lines = str(error).splitlines()
    return any(ON_HOST in line or by_name()["cuda-oom"].finds(line) for line in lines)


def sizes(error: BaseException) -> str:
    """What the allocator says of sizes: its first line, without its own advice."""
    first = (str(error).strip().splitlines() or ["memory could not be allocated"])[0]
    for advice in ADVICE_OF_TORCH:
        first = first.partition(advice)[0].rstrip()
    return first[first.find(ON_HOST) :] if ON_HOST in first else first


def of_the_host(error: BaseException) -> bool:
    """Whose memory an error that `is_shortage` is about: the host's, or a GPU's."""
    return ON_HOST in str(error) or isinstance(error, MemoryError)
