"""Figures for other programs: TensorBoard event files, Weights & Biases, trackio.

Each is an extra of its own. One that is asked for and not installed is said loudly; one that fails on the way
is said and left out from then on: no tracker ends a run.
"""

from __future__ import annotations

import importlib
import os
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from trainer.sections import Logging

Say = Callable[[str], None]
CLOSE_S = 20.0


class Tracker(Protocol):
    def log(self, figures: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir` shows them."""

    def __init__(self, folder: Path, section: Logging, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """wandb, and trackio, which took over its interface: init, log, finish."""

    package: str

    def __init__(self, folder: Path, section: Logging, config: dict[str, Any]) -> None:
        self._module: Any = importlib.import_module(self.package)
        name = os.environ.get("DFLASH_TAG") or folder.resolve().name
        self._module.init(project=section.project, name=name, config=config)

    def log(self, figures: dict[str, float], step: int) -> None:
        self._module.log(figures, step=step)

    def close(self) -> None:
        self._module.finish()


class Wandb(Service):
    package = "wandb"

    def __init__(self, folder: Path, section: Logging, config: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_DIR", str(folder))  # its own files belong to the run's
        super().__init__(folder, section, config)


class Trackio(Service):
    package = "trackio"


KINDS: dict[str, type[TensorBoard | Service]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def threw(error: BaseException) -> bool:
    """Whether this ended a thread of a tracker's own: its code was running, and none of ours. The tracker
    raises it again when it is next told something, and is left out then.
    """
    frames = traceback.walk_tb(error.__traceback__)
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames}
    return __package__.partition(".")[0] not in packages and not packages.isdisjoint(KINDS)


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Plain numbers by name; a list's by name/1, name/2, ... (slots are counted from 1)."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            found |= {f"{name}/{number}": float(each) for number, each in enumerate(value, 1)}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


class Trackers:
    """All that a run has."""

    def __init__(self, section: Logging, folder: Path, config: dict[str, Any], say: Say) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        asked = section.trackers is not None
        for name in dict.fromkeys(section.trackers if section.trackers is not None else ["tensorboard"]):
            try:
                self._open[name] = KINDS[name](folder, section, config)
            except ImportError as error:
                if asked:
                    say(
                        f"WARNING: {name} was asked for (train.logging.trackers) and cannot be imported: "
                        f"{error}; its figures are in metrics.jsonl alone. next: pip install {name}"
                    )
            except Exception as error:  # whatever another program's client raises
                say(f"WARNING: {name} cannot be used, the run goes on without: {error}")

    @property
    def names(self) -> Iterable[str]:
        return self._open.keys()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        figures = scalars(metrics)
        self._each(lambda tracker: tracker.log(figures, step))

    def close(self) -> None:
        """Let each finish what it sends, within bounds: a network that is gone must not hold up the run."""
        closing = threading.Thread(
            target=self._each, args=(lambda tracker: tracker.close(),), name="trackers", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            names = ", ".join(self._open)
            self._say(f"WARNING: {names} did not finish within {CLOSE_S:.0f} s and is left alone")
        self._open.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in [*self._open.items()]:
            try:
                action(tracker)
            except Exception as error:  # a network, a disk, a service: nothing that training needs
                self._open.pop(name, None)
                self._say(f"WARNING: {name} failed and is left out from now on: {error}")
