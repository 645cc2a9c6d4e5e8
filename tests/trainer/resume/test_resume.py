"""Going on from a checkpoint: which one is taken, and that it is the same training.

Run: python -m pytest tests/trainer/resume/test_resume.py
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_runs import at, harm, losses, train
from test_kill_and_resume import STEPS, section

from trainer import config as configs
from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.resume import Progress, choose, make_room
from trainer.data.prompts import row_order
from trainer.errors import ConfigError, TrainerError
from trainer.run.loop import Trainer
from trainer.topology.work import row_gradients, shares


def test_what_a_checkpoint_says_of_itself(finished: Path, target: Path) -> None:
    facts = checkpoint.read_facts(at(finished, STEPS))
    assert facts["schedule"]["step"] == STEPS and facts["schedule"]["elapsed_s"] > 0
    assert facts["position"] == {"rows": 96, "epoch": 9, "row_of_epoch": 6}  # 4 rows a step, of 10
    assert facts["train"] == configs_as_json(section(target))
    assert len(facts["code"]["sha256"]) == len(facts["target"]["sha256"]) == 64
    assert facts["data"]["rows"] == 10 and len(facts["data"]["rows_sha256"]) == 64


def test_what_is_handed_to_the_writer_does_not_change_any_more() -> None:
    progress = Progress(step=5, bad_rows=[3], measured=[(4, 1.5, 1.25)])
    facts = progress.to_json(batch_rows=4, rows=10, warmup=1)
    progress.measured.append((6, None, 2.0))
    progress.bad_rows.append(7)
    assert facts["measured"] == [(4, 1.5, 1.25)] and facts["bad_rows"] == [3]
    assert Progress.from_json(json.loads(json.dumps(facts))) == Progress(5, 0.0, [3], [(4, 1.5, 1.25)])


def configs_as_json(made: dict[str, Any]) -> Any:
    import dataclasses

    return json.loads(json.dumps(dataclasses.asdict(configs.load(made))))


def test_a_damaged_newest_is_passed_over_loudly_and_put_aside(
    old: Path, finished: Path, target: Path
) -> None:
    harm(at(old, STEPS))
    said = "\n".join(train(section(target), old, old))
    assert "WARNING: a checkpoint is damaged and passed over" in said and "state.safetensors has" in said
    assert f"going on from {at(old, STEPS - 2)}" in said
    assert losses(old) == losses(finished)
    assert (old / "checkpoints" / f"damaged-{checkpoint.folder_name(STEPS)}").is_dir()
    checkpoint.verify(at(old, STEPS))  # written anew
    mine, theirs = (at(folder, STEPS) / "model.safetensors" for folder in (old, finished))
    assert mine.read_bytes() == theirs.read_bytes()


def test_when_all_are_damaged_it_is_refused(old: Path, target: Path) -> None:
    for folder in checkpoint.listed(old / "checkpoints"):
        harm(folder)
    with pytest.raises(ConfigError, match="all of its 3 checkpoints are damaged"):
        train(section(target), old, old)


def test_a_damaged_one_that_is_named_is_refused_and_a_sound_one_is_named(old: Path, target: Path) -> None:
    harm(at(old, STEPS))
    harm(at(old, STEPS - 2))
    with pytest.raises(ConfigError, match=r"bytes, .* were written\n.*resume from .*step-0000020"):
        train(section(target), old, at(old, STEPS))


def test_no_older_one_is_gone_on_from_where_a_newer_one_stands(
    old: Path, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="step-0000024 is newer than step-0000020, and sound"):
        train(section(target), old, at(old, STEPS - 4))
    elsewhere = tmp_path / "other"
    train(section(target), elsewhere, at(old, STEPS - 4))
    assert sorted(losses(elsewhere)) == [21, 22, 23, 24]
    assert [path.name for path in checkpoint.listed(elsewhere / "checkpoints")] == [
        "step-0000024",
        "step-0000022",
    ]


def test_two_runs_checkpoints_do_not_share_a_folder(old: Path, target: Path, tmp_path: Path) -> None:
    """What is saved would be older than all that is there, and be pruned at once."""
    other = tmp_path / "other"
    shutil.copytree(old, other)
    shutil.rmtree(at(old, STEPS))
    shutil.rmtree(at(old, STEPS - 2))
    with pytest.raises(ConfigError, match=rf"of another run than .*/run/.*\n.*--resume {other}, or name"):
        train(section(target), other, old)
    assert len(checkpoint.listed(other / "checkpoints")) == 3


def test_the_newest_is_the_one_of_the_latest_step_not_of_the_last_name(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "long" / "checkpoints"
    for step, number in ((STEPS, 10_000_000), (STEPS - 2, 9_999_999)):
        shutil.copytree(at(old, step), at(root.parent, number))
    with pytest.raises(ConfigError, match="step-10000000 is newer than step-9999999"):
        make_room(root, at(root.parent, 9_999_999), print)
    harm(at(root.parent, 10_000_000))
    with pytest.raises(ConfigError, match=r"resume from .*step-9999999"):
        choose(at(root.parent, 10_000_000), print)


def test_what_cannot_be_removed_or_linked_costs_no_checkpoint(
    old: Path, target: Path, tmp_path: Path
) -> None:
    """A link is not removed as a folder is, nor is one that another machine reads; `best` is in the way."""
    root = old / "checkpoints"
    for step in (STEPS, STEPS - 2):
        shutil.rmtree(at(old, step))
    (tmp_path / "elsewhere").mkdir()
    at(old, 1).symlink_to(tmp_path / "elsewhere")
    (root / "best").unlink()
    (root / "best").mkdir()
    (root / "best" / "notes").touch()
    (root / ".best.tmp").symlink_to("what a killed one left")
    said = "\n".join(train(section(target), old, at(old, STEPS - 4)))
    checkpoint.verify(at(old, STEPS))
    assert "could not be written" not in said
    assert said.count(f"WARNING: {at(old, 1)} cannot be removed, and stays: Cannot call rmtree on a") == 1

    (root / "best" / "notes").unlink()
    (root / "best").rmdir()
    (root / "best").symlink_to("step-0000003")  # removed by a person
    train(section(target), old, old)
    assert (root / "best").resolve() == at(old, STEPS).resolve()


def test_a_folder_with_checkpoints_is_not_trained_over(old: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints of an earlier run\n.*--resume"):
        train(section(target), old)
    with pytest.raises(ConfigError, match="no checkpoint there"):
        train(section(target), old.parent / "new", old.parent / "nowhere")


@pytest.mark.parametrize("budget", [{"train_s": 30.0}, {"train_s": 30.0, "total_s": 600.0}])
def test_time_that_is_used_up_is_used_up_for_a_run_that_goes_on(
    old: Path, target: Path, tmp_path: Path, budget: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "from_json", lambda facts: Progress(facts["schedule"]["step"], 30.0))
    said = train(section(target, budget=budget), tmp_path / "on", old, allow=True)
    assert f"all {STEPS} steps are done: only what was trained is measured" in said
    assert checkpoint.read_facts(at(tmp_path / "on", STEPS))["schedule"]["step"] == STEPS


def test_rows_that_time_cut_short_are_made_as_many_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock let the first life make 6 of 12 rows; the second makes 6, though it has all the time."""
    data = {"rows": 12, "row_tokens": 24, "prompt_tokens": 8, "batch": 6, "budget_s": 1e-1}
    made = section(target, data=data, budget={"steps": 4})
    ticks: Iterator[float] = iter(range(10_000))
    with monkeypatch.context() as slow:
        slow.setattr("trainer.data.dataset.time.monotonic", lambda: float(next(ticks)))
        train(made, tmp_path / "run")
    facts = checkpoint.read_facts(at(tmp_path / "run", 4))
    assert facts["data"]["rows"] == 6
    train(made, tmp_path / "new", at(tmp_path / "run", 2))
    assert losses(tmp_path / "new") == {step: losses(tmp_path / "run")[step] for step in (3, 4)}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_at_another_world_size_it_is_the_same_training(
    finished: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The batch of every step after the 20th is divided over workers, whose gradients are added up."""
    made = section(target)
    seen: list[list[int]] = []

    def divided(self: Trainer, number: int, factor: float) -> Any:
        total = None
        index = self.order(number, self.config.batch_rows)
        for rows in shares(self.config.batch_rows, workers):
            batch, _ = self.data.batch(index[rows], self.parts.target)
            sums = row_gradients(self.step, self.config, batch, number, rows)
            total = sums if total is None else total + sums
            seen.append(index[rows].tolist())
        assert total is not None
        return total, self.optimizer.step(factor, total.weight), None

    monkeypatch.setattr(Trainer, "one_step", divided)
    train(made, tmp_path / "new", at(finished, STEPS - 4))
    whole = losses(finished)
    for step, loss in losses(tmp_path / "new").items():
        assert loss == pytest.approx(whole[step], rel=2e-4), step
    assert sorted(losses(tmp_path / "new")) == [21, 22, 23, 24]
    assert len(seen) == 4 * workers
    assert [row for rows in seen for row in rows] == [
        row for number in range(20, 24) for row in row_order(10, 0)(number, 4).tolist()
    ]


@pytest.mark.parametrize(
    ("code", "mend"), [(errno.ENOSPC, "make room there"), (errno.EROFS, "how it is mounted")]
)
def test_a_final_checkpoint_that_cannot_be_written_fails_the_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, mend: str
) -> None:
    made = section(target, budget={"steps": 3}, checkpoint={"every_s": None})

    def refusing() -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("trainer.checkpoint.tensorfile.before_piece", refusing)
    with pytest.raises(TrainerError, match="checkpoint of step 3 could not be written: ") as caught:
        train(made, tmp_path / "run")
    assert caught.value.what.endswith(os.strerror(code)) and mend in caught.value.next
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "the checkpoint of step 3 could not be written" in events


def test_a_full_disk_in_the_middle_is_survived_and_said(
    finished: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the write of step 4 to that of step 8 there is no space; training does not care."""
    calls: list[str] = []
    real: Callable[..., Path] = checkpoint.write

    def write(root: Path, snapshot: checkpoint.Snapshot) -> Path:
        if 4 <= snapshot.step <= 8:
            calls.append(f"step {snapshot.step}")
            raise OSError(28, "No space left on device")
        return real(root, snapshot)

    monkeypatch.setattr(checkpoint, "write", write)
    said = "\n".join(train(section(target), tmp_path / "run"))
    assert calls
    for step in calls:
        assert f"WARNING: the checkpoint of {step} could not be written: No space left on device" in said
    assert losses(tmp_path / "run") == losses(finished)
    checkpoint.verify(at(tmp_path / "run", STEPS))
