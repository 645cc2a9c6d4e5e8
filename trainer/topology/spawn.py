"""What starts the processes of a run, and waits for them: torch's elastic agent; for one alone a plain child,
which needs no torch here and no rendezvous.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import TrainerError

HERE = "127.0.0.1"
CONNECT_S = 5.0
Deaths = dict[int, tuple[int, float]]
"""Rank -> exit code (negative: a signal) and when (s since the epoch), of those that did not end well."""

NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a collective that fails or times out ends its process
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",  # for what our own deadlines, which are shorter, cannot see
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "20000",
}
"""What makes NCCL tell of its own hangs; a person's own settings stand."""


def run_alone(argv: Sequence[str]) -> Deaths:
    """`python argv` as the one process of a run, until it ends."""
    code = subprocess.call([sys.executable, *argv])
    return {0: (code, time.time())} if code else {}


def _check_loopback() -> None:
    """At once and in a sentence, what the rendezvous would find after a minute, in a traceback."""
    try:
        with (
            socket.create_server((HERE, 0)) as server,
            socket.create_connection(server.getsockname(), CONNECT_S),
        ):
            pass
    except OSError as problem:
        raise TrainerError(
            f"the processes of a run meet at {HERE}, and nothing can be reached there: {problem.strerror}",
            next="bring the loopback interface up (ip link set lo up), or use one process (layout.ranks: 1)",
        ) from None


def run_ranks(argv: Sequence[str], run: Path, ranks: int) -> Deaths:
    """`python argv` for every rank, until the last has ended. Raises TrainerError: they could not meet."""
    _check_loopback()
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for name, value in {
        "OMP_NUM_THREADS": "1",
        **NCCL,
        "TORCH_FR_DUMP_TEMP_FILE": str(run / "ranks" / "nccl-trace-"),
    }.items():
        os.environ.setdefault(name, value)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        logs_specs=DefaultLogsSpecs(log_dir=str(run / "ranks")),
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:0",
        local_addr=HERE,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*argv)
    except ChildFailedError as error:
        return {
            rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in error.failures.items()
        }
    return {}
