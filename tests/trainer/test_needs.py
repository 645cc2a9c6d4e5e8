"""An interpreter that is too old, or lacks packages: one message, and how to mend it.

Run: python -m pytest tests/trainer/test_needs.py
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import guard, needs
from trainer.errors import ConfigError

PROJECT = Path(__file__).parents[2]
WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {gone!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Without())
"""


def trainer(place: Path, gone: set[str], *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m trainer` as an interpreter without these packages runs it, in `place`."""
    (place / "sitecustomize.py").write_text(WITHOUT.format(gone=gone))
    return subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}:{PROJECT}", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def said(*packages: str) -> str:
    python = sys.executable
    return (
        f"error: {python} has no {', '.join(packages)}\n"
        f"next: {python} -m pip install {' '.join(packages)}; "
        f"or start it by a Python that has {'it' if len(packages) == 1 else 'them'}\n"
    )


def test_training_without_the_extra_is_one_message_and_leaves_no_folder(tmp_path: Path) -> None:
    done = trainer(tmp_path, {"torch", "safetensors"}, "train", str(PROJECT / "recipes" / "demo.yaml"))
    assert (done.returncode, done.stderr) == (2, said("torch", "safetensors"))
    assert not (tmp_path / "runs").exists()


def test_a_launched_run_leaves_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = str(PROJECT / "recipes" / "demo.yaml")
    done = trainer(tmp_path, {"torch"}, "train", recipe, DFLASH_RUN_DIR=str(folder))
    assert (done.returncode, done.stderr) == (2, said("torch"))
    assert "No module named 'torch'" in (folder / "root_cause.json").read_text()


@pytest.mark.parametrize(
    "words", [["plan", str(PROJECT / "recipes" / "demo.yaml")], ["bench", "loss", "--device", "cpu"]]
)
def test_no_other_command_ends_in_a_traceback_either(words: list[str], tmp_path: Path) -> None:
    done = trainer(tmp_path, {"torch"}, *words)
    assert (done.returncode, done.stderr) == (2, said("torch"))


def test_even_the_command_line_may_lack_its_package(tmp_path: Path) -> None:
    done = trainer(tmp_path, {"typer", "yaml"}, "--help")
    assert (done.returncode, done.stderr) == (2, said("pyyaml", "typer"))


def test_a_package_that_another_needs_is_named_too(tmp_path: Path) -> None:
    done = trainer(tmp_path, {"click"}, "--help")
    if done.returncode:  # where typer brings its own
        assert (done.returncode, done.stderr) == (2, said("click"))


def test_a_module_that_is_gone_from_a_package_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        import trainer.no_such_module  # type: ignore[import-not-found]  # noqa: F401

    assert guard.guarded(work) == 1
    assert "Traceback" in capsys.readouterr().err
    assert needs.missing_package(ModuleNotFoundError("x", name="torch.no_such")) is None
    assert needs.missing_package(ImportError("x", name="no_such")) is None


def test_an_older_python_is_told_before_anything_is_imported() -> None:
    assert needs.older_python() is None
    told = needs.older_python((3, 10, 13, "final", 0))
    assert told is not None
    assert told[0] == f"{sys.executable} is Python 3.10.13; the trainer needs 3.11 or newer"
    for name in ("__main__.py", "needs.py"):
        source = (PROJECT / "trainer" / name).read_text()
        ast.parse(source, feature_version=(3, 8))


def test_with_everything_there_nothing_is_said() -> None:
    needs.check_packages()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(needs.PACKAGES, "no_such_module", "no-such-package")
        with pytest.raises(ConfigError, match="has no no-such-package"):
            needs.check_packages()
