"""Memory that two processes share: the host's, and a GPU's by CUDA IPC, opened once as a transport does
it."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp

from .common import Figures, run

VALUES = 1 << 20
WAIT_S = 60.0


def _other(inbox: mp.Queue, outbox: mp.Queue, device: str | None) -> None:
    """The second process: reads what the first wrote, writes where the first reads."""
    try:
        shared = inbox.get(timeout=WAIT_S)
        seen = int(shared[:1000].sum())
        if device is None:
            shared.fill_(7)
        else:
            shared.copy_(torch.full((VALUES,), 7, dtype=torch.int32, device=device))
            torch.cuda.synchronize()
        del shared
        outbox.put(seen)
    except BaseException as error:
        outbox.put(f"{type(error).__name__}: {error}")


def share(mine: str, theirs: str | None) -> Figures:
    """A tensor on `mine` is filled by a process that works on `theirs`. Raises RuntimeError with what that
    one met, AssertionError where the numbers are wrong."""
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=_other, args=(inbox, outbox, theirs))
    process.start()
    shared = torch.ones(VALUES, dtype=torch.int32, device=mine)
    if mine == "cpu":
        shared.share_memory_()
    inbox.put(shared)
    seen = outbox.get(timeout=WAIT_S)
    process.join(WAIT_S)
    if isinstance(seen, str):
        raise RuntimeError(f"the other process: {seen}")
    assert seen == 1000, f"the other process read {seen}, not 1000"
    if mine != "cpu":
        torch.cuda.synchronize()
    assert int(shared.sum()) == 7 * VALUES, "what the other process wrote has not arrived"
    return {}


if __name__ == "__main__":
    run(
        {
            "host-memory": lambda: share("cpu", None),
            "one-gpu": lambda: share("cuda:0", "cuda:0"),
            "two-gpus": lambda: share("cuda:0", "cuda:1"),
            "expandable-segments": lambda: share("cuda:0", "cuda:0"),
        }
    )
