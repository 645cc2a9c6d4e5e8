"""The optimizer shared out over ranks: the losses and checkpoints of one that is not, in less memory.

Run: python -m pytest tests/trainer/topology/test_shares.py
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from faulty_runs import LIMIT_S, alive, colocated, losses, section, start
from owners import hold_owners_to_one_that_owns_all
from torch import nn

from trainer import config as configs
from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.sections import Optimizer, ParameterGroup
from trainer.topology.sharing import decide, problem, share_of
from trainer.training.optim import DrafterOptimizer, Share

ALONE = colocated(1)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_shares_have_every_element_once(size: int) -> None:
    counts = [7, 1, 12, 3, 2]
    found = [Share(rank, size).cuts(counts) for rank in range(size)]
    for place, count in enumerate(counts):
        mine = [element for cuts in found for element in range(count)[cuts[place]]]
        assert mine == list(range(count))
    lengths = [sum(len(range(c)[cut]) for c, cut in zip(counts, cuts, strict=True)) for cuts in found]
    assert max(lengths) == Share(0, size).length(25) and sum(lengths) == 25


def test_owners_of_shares_do_the_steps_of_one_that_owns_all(tmp_path: Path) -> None:
    hold_owners_to_one_that_owns_all(3, tmp_path, "cpu")


def test_shared_ranks_train_save_and_resume_as_one_process_does(saved_target: Path, tmp_path: Path) -> None:
    """Two ranks, then three, then one that has all; a checkpoint says nothing of how many made it."""
    run(configs.load(section(saved_target, ALONE, 9)), RunFiles(tmp_path / "alone"), lambda text: None)
    wanted = losses(tmp_path / "alone")
    folder = tmp_path / "ranks"
    for ranks, steps, options in ((2, 4, ()), (3, 7, ("--resume", str(folder), "--allow-changes"))):
        content = section(saved_target, colocated(ranks), steps) | {
            "checkpoint": {"every_steps": 2, "keep": 9}
        }
        content["layout"]["shard_optimizer"] = "on"
        process = start(folder, content, *options, forked=True)
        text, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text
        assert "optimizer: a share on every rank: the recipe says so" in text
        assert alive(folder) == []
    saved = checkpoint.listed(folder / "checkpoints")
    assert saved[0].name == "step-0000007" and len(saved) >= 3
    run(
        configs.load(section(saved_target, ALONE, 9)),
        RunFiles(folder),
        lambda text: None,
        None,
        folder,
        True,
    )
    assert losses(folder) == pytest.approx(wanted, rel=1e-5)
    mine, theirs = (
        load_drafter(each / "checkpoints" / "step-0000009") for each in (folder, tmp_path / "alone")
    )
    for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_shared_ranks_that_are_stopped_save_one_step(saved_target: Path, tmp_path: Path) -> None:
    folder, content = tmp_path / "ranks", section(saved_target, colocated(2), 400)
    content["layout"]["shard_optimizer"] = "on"
    process = start(folder, content, forked=True)
    end = time.monotonic() + LIMIT_S
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143, text
    (saved,) = checkpoint.listed(folder / "checkpoints")
    checkpoint.verify(saved)
    step = checkpoint.read_facts(saved)["schedule"]["step"]
    assert len(losses(folder)) == step
    assert json.loads((folder / "heartbeat.json").read_text())["step"] == step
    run(
        configs.load(section(saved_target, ALONE, step + 1)),
        RunFiles(folder),
        lambda text: None,
        None,
        folder,
        True,
    )
    run(
        configs.load(section(saved_target, ALONE, step + 1)),
        RunFiles(tmp_path / "alone"),
        lambda text: None,
    )
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


MUON = [ParameterGroup("m", ["weight"], algorithm="muon"), ParameterGroup("b", ["bias"])]


@pytest.mark.parametrize(
    ("wish", "state", "free", "reason", "shared", "why"),
    [
        ("off", 9.0, 1.0, None, False, "the recipe says so"),
        ("on", 1.0, 9.0, None, True, "the recipe says so"),
        ("auto", 5.0, 9.0, None, True, "gradients and moments take 5.0 GiB, 9.0 GiB are free"),
        ("auto", 4.0, 9.0, None, False, "gradients and moments take 4.0 GiB, 9.0 GiB are free"),
        ("auto", 5.0, 9.0, "it is Muon's", False, "it is Muon's"),
        ("auto", 5.0, None, None, False, "how much memory is free is not known"),
    ],
)
def test_the_optimizer_is_shared_out_where_memory_is_short(
    wish: str, state: float, free: float | None, reason: str | None, shared: bool, why: str
) -> None:
    gib = 2.0**30
    assert decide(wish, state * gib, None if free is None else free * gib, reason) == (shared, why)


def test_muon_and_other_topologies_are_not_shared_out(tmp_path: Path) -> None:
    content = section(tmp_path, colocated(2), 4)
    assert problem(configs.load(content)) is None
    assert share_of(configs.load(content), 1, torch.device("cpu"), None) == (None, "there is one process")
    split = configs.load(content | {"topology": "split", "layout": {}})
    assert problem(split) == "topology split does not"
    with pytest.raises(ConfigError, match="group m is Muon's, which needs whole matrices"):
        DrafterOptimizer(nn.Linear(2, 2), Optimizer(groups=MUON), Share(0, 2))
