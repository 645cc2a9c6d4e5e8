"""Keys that count only with others: the table says what training does.

Tiny runs, in which it is noted who reads which key. A key that counts is read; one that does not is not, or
is passed on and changes nothing: a run with other values of all that do not count learns the same weights.

Run: python -m pytest tests/trainer/test_unread_keys.py
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from small_store import make_store

from trainer import config as configs
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.sections import TrainConfig
from trainer.unread_keys import ASK_NOTHING, COUNTS_ONLY_WITH

BOOKKEEPING = ("dataclasses", "trainer.config_rules", "trainer.unread_keys")
"""Read every key, and do nothing by it."""

ELSEWHERE = {
    "policy.tls",  # with CUDA graphs
    "drafter.init_from",  # begins with a drafter of another run
    "layout.ranks",  # the launcher's, of several processes
    "layout.shard_optimizer",
    "layout.floor_gib_s",
    "layout.wait_s",  # one process alone waits for nobody
    "policy.force",  # asked only where torch is known to break
    "target.compile",  # on a GPU
}
"""Count, and are not read in runs of one process on a CPU without known failures."""

PASSED_ON = {
    "data.temperature",
    "drafter.sliding_window",
    "policy.tls",
    "schedule.floor",
    "evaluate.new_tokens",
    "evaluate.every_prompts",
    "evaluate.every_steps",
    "evaluate.every_s",
    "evaluate.prefix_every_steps",
    "evaluate.prefix_every_s",
}
"""Are read where they do not count; that the runs are the same shows that they change nothing there."""

DEMANDED = {"a store": {"data.states"}}
"""Have one right value in that run, which is asked for and then known."""

BASE: dict[str, Any] = {
    "token_budget": 96,
    "threads": 1,
    "drafter": {"layers": 2, "block_size": 4, "mask_token": "<|mask|>"},
    "data": {"row_tokens": 24},
    "objective": {"anchors_per_document": 4, "gamma": 3.0},
    "optimizer": {"lr": 0.01},
    "budget": {"steps": 4},
    "report_every_s": 0.0,
    "evaluate": {"prompts": 2, "prompts_before": 1, "prompt_tokens": 8, "new_tokens": 8, "first_tokens": 4},
    "logging": {"trackers": []},
}
GENERATED = {"rows": 12, "prompt_tokens": 8, "batch": 6}
TEXT = {"rows": 12, "continuations": False, "states": "cached"}
STORED = {"source": "store", "row_tokens": 64, "continuations": False, "states": "online"}
MUON = [
    {"name": "matrices", "match": ["*_proj.weight", "fc.weight"], "algorithm": "muon"},
    {"name": "norms", "match": ["*norm.weight", "*.bias"]},
]
RUNS: dict[str, dict[str, Any]] = {
    "continuations, from the target": {
        "data": GENERATED,
        "drafter": {"init": "target", "init_layers": [1, 2]},
        "logging": {"trackers": ["wandb"], "project": "mine"},
    },
    "greedy continuations, at a constant rate": {
        "data": {**GENERATED, "greedy_share": 1.0},
        "drafter": {"taps": [0, 2]},
        "schedule": {"kind": "constant_linear", "constant_share": 1.0},
        "evaluate": {"every_steps": None, "prefix_every_steps": None},
    },
    "text, by D-PACE and Muon": {
        "data": TEXT,
        "drafter": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
        "objective": {"weighting": "dpace", "gamma": None},
        "optimizer": {"groups": MUON},
        "schedule": {"kind": "constant_linear", "floor": 0.1},
        "evaluate": {"prompts": 0},
    },
    "a store": {"data": STORED, "token_budget": 128, "evaluate": {"prompts": 0}},
    "threads": {"topology": "threads", "data": {**TEXT, "states": "online"}},
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and key in base else value
            for key, value in over.items()
        },
    }


def keys(section: type, path: str = "") -> Iterator[tuple[str, type, Any, Mapping[str, Any]]]:
    """(key path, class, type, limits) of everything that has no keys below it."""
    hints = typing.get_type_hints(section)
    for field in fields(section):
        if is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", section, hints[field.name], field.metadata


KEYS = {key: (hint, limits) for key, _, hint, limits in keys(TrainConfig)}


def another(key: str, value: Any) -> Any:
    """A value that the key may have and does not."""
    hint, limits = KEYS[key]
    options = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    kind = options[0]
    if get_origin(hint) is Literal:
        return next(each for each in reversed(options) if each != value and each not in ASK_NOTHING)
    if get_origin(kind) is list or kind is list:
        return [0, 1] if get_args(kind) == (int,) else ["x"]
    if kind is bool:
        return not value
    if kind is str:
        return f"other than {value}"
    low, high = limits.get("low") or 0, limits.get("high")
    return next(
        kind(each)
        for each in (low + 1, low + 2, (low + high) / 2 if high else low + 3)
        if kind(each) != value and (high is None or each <= high)
    )


def with_value(config: Any, key: str, value: Any) -> Any:
    name, _, below = key.partition(".")
    return replace(config, **{name: with_value(getattr(config, name), below, value) if below else value})


def uncounted(config: TrainConfig) -> set[str]:
    return {key for key, needs in COUNTS_ONLY_WITH.items() if not all(each.met(config) for each in needs)}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys that are read from here on, by whoever might do something by them."""
    found: set[str] = set()
    names: dict[type, dict[str, str]] = {}
    for key, section, _, _ in keys(TrainConfig):
        names.setdefault(section, {})[key.rpartition(".")[2]] = key

    def noting(section: type) -> Callable[[Any, str], Any]:
        def get(self: Any, name: str) -> Any:
            if name in names[section]:
                frame = sys._getframe(1)
                by = frame.f_globals["__name__"]
                if by not in (*BOOKKEEPING, __name__) and frame.f_code.co_name != "__eq__":
                    found.add(names[section][name])
            return object.__getattribute__(self, name)

        return get

    for section in names:
        monkeypatch.setattr(section, "__getattribute__", noting(section), raising=False)
    return found


@pytest.fixture
def section_of(tmp_path: Path, saved_target: Path) -> Callable[[str], dict[str, Any]]:
    def made(name: str) -> dict[str, Any]:
        section = merged(merged(BASE, {"target": {"path": str(saved_target)}}), RUNS[name])
        if section["data"].get("source") == "store":
            section["data"]["store"] = str(make_store(tmp_path, saved_target).folder)
        return section

    return made


def learnt(config: TrainConfig, folder: Path) -> tuple[bytes, Any]:
    """The weights and the acceptance lengths of a run."""
    report = run(config, RunFiles(folder), lambda text: None)
    weights = folder / "checkpoints" / f"step-{config.budget.steps:07d}" / "model.safetensors"
    return weights.read_bytes(), None if report is None else report.rows


@pytest.mark.parametrize("name", RUNS)
def test_what_counts_is_read_and_what_does_not_changes_nothing(
    name: str,
    section_of: Callable[[str], dict[str, Any]],
    read: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Callable[..., None] = lambda *given, **named: None  # noqa: E731
    service = types.SimpleNamespace(init=nothing, log=nothing, finish=nothing)
    monkeypatch.setitem(sys.modules, "wandb", service)
    config = configs.load(section_of(name))
    missed = uncounted(config)
    other = config
    for key in missed:
        other = with_value(other, key, another(key, attrgetter(key)(config)))
    read.clear()
    plain = learnt(config, tmp_path / "plain")
    unused = KEYS.keys() - read - DEMANDED.get(name, set())
    assert unused <= missed | ELSEWHERE, "nothing reads these: COUNTS_ONLY_WITH should say when they count"
    assert read & missed <= PASSED_ON, "these are read where COUNTS_ONLY_WITH says that they do not count"
    read.clear()
    changed = learnt(other, tmp_path / "other")
    assert read & missed <= PASSED_ON
    assert changed == plain, f"one of these changes the run, though it should not count: {sorted(missed)}"


def test_each_key_of_the_table_is_tried_with_and_without(section_of: Callable[[str], dict[str, Any]]) -> None:
    without = [uncounted(configs.load(section_of(name))) for name in RUNS]
    ever, always = set.union(*without), set.intersection(*without)
    assert COUNTS_ONLY_WITH.keys() <= KEYS.keys()
    assert KEYS.keys() >= PASSED_ON | ELSEWHERE and COUNTS_ONLY_WITH.keys() >= PASSED_ON
    assert COUNTS_ONLY_WITH.keys() - ever <= ELSEWHERE, "no run does without these"
    assert always <= ELSEWHERE, "these count in no run"
