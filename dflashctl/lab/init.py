"""The first process of a container: /sbin/init there. Takes in orphans; on SIGTERM, SIGPWR or SIGINT asks
everybody to end, and ends when they have. container.start blocks these signals before it executes this file.

A program of its own, so that a container's pid 1 carries nothing of the process that made it. It imports
nothing of dflashctl: the container does not see the package.
"""

import os
import signal

HALT = {signal.SIGTERM, signal.SIGPWR, signal.SIGINT}
HALT_POLL_S = 0.05


def main() -> None:
    halting = False
    while True:
        if halting:
            signal.sigtimedwait({signal.SIGCHLD}, HALT_POLL_S)
        elif signal.sigwait(HALT | {signal.SIGCHLD}) in HALT:
            halting = True
            tell_all(signal.SIGTERM)
            tell_all(signal.SIGCONT)  # a stopped process acts on nothing else
        reap()
        if halting and not tell_all(0):
            return


def tell_all(number: int) -> bool:
    """Signal every other process; False when there is none."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return False
    return True


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
