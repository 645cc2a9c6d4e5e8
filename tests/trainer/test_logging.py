"""Where a run's figures go: lines, a terminal, TensorBoard, and services that may be missing or fail.

Run: python -m pytest tests/trainer/test_logging.py
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_runs import small_library
from test_kill_and_resume import section
from tiny_models import save_target

from trainer import config as configs
from trainer.process.runfiles import RunFiles
from trainer.process.trackers import Trackers, scalars, threw
from trainer.run.console import Plain, Standing, Terminal, for_stdout
from trainer.run.train import run
from trainer.sections import Logging
from trainer.words import duration

STANDING = Standing(
    step=7,
    share=0.25,
    loss=3.14159,
    acceptance_length=2.5,
    tokens_per_s=12_345.6,
    eta_s=252.0,
    slots="0.50 0.25",
    lr=6e-4,
)


def test_plain_lines_say_it_all() -> None:
    said: list[str] = []
    plain = Plain(said.append)
    plain.say("hello")
    plain.show(STANDING)
    plain.close()
    assert said == [
        "hello",
        "step 7 loss 3.142 slots 0.50 0.25 lr 0.0006 12,346 tokens/s 25% acceptance length 2.50 ETA 4m12s",
    ]


def test_a_terminal_gets_lines_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    terminal = Terminal(0.0, screen)
    terminal.show(STANDING)
    terminal.say("a line [not markup]")
    terminal.close()
    shown = screen.getvalue()
    for part in ("step 7 loss 3.142", "acceptance length 2.50", "12,346 tokens/s", "ETA 4m12s", "25%"):
        assert part in shown, part
    assert "a line [not markup]" in shown and "\x1b[" in shown


def test_only_a_terminal_gets_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plain = for_stdout(0.0)
    plain.say("hello")
    assert isinstance(plain, Plain) and capsys.readouterr().out.endswith(" s] hello\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert isinstance(for_stdout(0.0), Terminal)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (3.14, "3.1 s"), (59.9, "59.9 s"), (60.0, "1m00s"), (252.0, "4m12s"), (7654.0, "2h07m")],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_lists_become_numbered_figures() -> None:
    metrics = {"loss": 1.5, "slot_accuracy": [0.5, 0.25], "phase": "training", "flag": True, "step": 3}
    assert scalars(metrics) == {
        "loss": 1.5,
        "slot_accuracy/1": 0.5,
        "slot_accuracy/2": 0.25,
        "step": 3.0,
    }


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **logging: Any) -> tuple[Path, list[str]]:
    library = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: library)
    made = section(save_target(tmp_path / "target"), budget={"steps": 4}, logging=logging)
    said: list[str] = []
    run(configs.load(made), RunFiles(tmp_path / "run"), said.append)
    return tmp_path / "run", said


def test_tensorboard_events_hold_every_reported_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = train(tmp_path, monkeypatch)  # without a word in the recipe
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "slot_accuracy/1"} <= set(events.Tags()["scalars"])
    import json

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = [(line["step"], line["loss"]) for line in lines]
    found = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("loss")]
    assert wanted == found and len(found) == 4


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_what_is_asked_for_and_missing_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "wandb", "trackio", "torch.utils.tensorboard")
    _, said = train(tmp_path, monkeypatch, trackers=["wandb", "tensorboard", "trackio"])
    for name in ("wandb", "tensorboard", "trackio"):
        (line,) = [line for line in said if line.startswith(f"WARNING: {name} was asked for")]
        assert f"pip install {name}" in line
    assert any(line.startswith("step 4 loss") for line in said)


def test_tensorboard_is_not_missed_where_nobody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "torch.utils.tensorboard")
    _, said = train(tmp_path, monkeypatch)
    assert not [line for line in said if "WARNING" in line]


class Service(types.ModuleType):
    """wandb's and trackio's interface."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def init(self, project: str, name: str, config: dict[str, Any]) -> None:
        self.calls.append(("init", (project, name, config["optimizer"]["lr"])))

    def log(self, figures: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        self.calls.append(("log", (step, figures["loss"])))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_configuration_figures_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setenv("DFLASH_TAG", "localtls")
    train(tmp_path, monkeypatch, trackers=[name], project="mine")
    assert service.calls[0] == ("init", ("mine", "localtls", 0.01))
    assert [call[1][0] for call in service.calls if call[0] == "log"] == [1, 2, 3, 4]
    assert service.calls[-1] == ("finish", None)


def test_a_service_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service("wandb", fails_at=2)
    monkeypatch.setitem(sys.modules, "wandb", service)
    _, said = train(tmp_path, monkeypatch, trackers=["wandb"])
    assert [call[0] for call in service.calls] == ["init", "log"]
    assert "WARNING: wandb failed and is left out from now on: no route to host" in said
    assert any(line.startswith("step 4 loss") for line in said)


def test_a_service_that_never_finishes_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, never = Service("wandb"), threading.Event()
    monkeypatch.setattr(service, "finish", never.wait)
    monkeypatch.setattr("trainer.process.trackers.CLOSE_S", 0.1)
    monkeypatch.setitem(sys.modules, "wandb", service)
    _, said = train(tmp_path, monkeypatch, trackers=["wandb"])
    never.set()
    assert "WARNING: wandb did not finish within 0 s and is left alone" in said
    assert [call[0] for call in service.calls] == ["init", *["log"] * 4]


def test_a_tracker_whose_own_thread_fails_is_left_out_and_ends_nothing(tmp_path: Path) -> None:
    """TensorBoard writes in a thread of its own: when the disk fills up, it is that thread that fails."""
    program = (
        "import resource, threading, time\nfrom pathlib import Path\n"
        "from trainer.sections import Logging\nfrom trainer.process.runfiles import RunFiles\n"
        "from trainer.process.trackers import Trackers\n"
        f"folder = Path({str(tmp_path)!r})\nfiles = RunFiles(folder)\nfiles.listen()\n"
        "trackers = Trackers(Logging(trackers=['tensorboard']), folder, {}, print)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "deadline, step = time.monotonic() + 60, 0\n"
        "while trackers.names and time.monotonic() < deadline:\n"
        "    step += 1\n    trackers.log({'loss': 1.0}, step)\n"
        "trackers.close()\n"
        "for thread in threading.enumerate():\n"
        "    if type(thread).__name__ == '_AsyncWriterThread': thread.join(60)\n"
        "print('trained on')\n"
    )
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, left_out, last = done.stdout.splitlines()
    assert left_out.startswith("WARNING: tensorboard failed and is left out from now on: ")
    assert "File too large" in left_out and last == "trained on"
    assert done.stderr.count("of a tracker failed; the run goes on") == 1
    assert not (tmp_path / "root_cause.json").exists()


def test_a_thread_of_ours_that_fails_in_a_trackers_code_is_ours() -> None:
    def fails() -> None:
        raise OSError("its own")

    def calls(work: Callable[[], None]) -> None:
        work()

    theirs = types.FunctionType(fails.__code__, {"__name__": "wandb.sdk"})
    ours = types.FunctionType(calls.__code__, {"__name__": "trainer.topology.crew"})
    for work, of_a_tracker in ((theirs, True), (lambda: ours(theirs), False)):
        with pytest.raises(OSError, match="its own") as caught:
            work()
        assert threw(caught.value) is of_a_tracker
    with pytest.raises(ZeroDivisionError) as stranger:
        _ = 1 / 0
    assert not threw(stranger.value)


def test_an_unknown_tracker_is_refused() -> None:
    problems = configs.check({"target": {"path": "x"}, "logging": {"trackers": ["tensorbord"]}})
    assert any(
        "train.logging.trackers[0]: 'tensorbord' is not one of tensorboard" in line for line in problems
    )


def test_no_trackers_at_all(tmp_path: Path) -> None:
    trackers = Trackers(Logging(trackers=[]), tmp_path, {}, print)
    trackers.log({"loss": 1.0}, 1)
    trackers.close()
    assert list(trackers.names) == [] and list(tmp_path.iterdir()) == []
