"""Each mistake of mutants.py, made in a copy of the tree, must fail the tests that are named for it.

A test that nothing can fail proves nothing. The copy's tests pass without a mutation (checked first,
together), so a failure is the mutation's. Those that need the bed run under `make soak`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("dflashctl", "trainer", "tests", "recipes", "docs", "pyproject.toml", "hosts.yaml")
LIMIT_S = 240
TEST_LIMIT_S = 25
"""For one test, where it runs without the bed: some mistakes are waits without end."""
QUICK = [m for m in MUTANTS if not m.bed]
BED = [m for m in MUTANTS if m.bed]


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, to be changed; one for each worker."""
    target = tmp_path_factory.mktemp("mutants") / "tree"
    target.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis", "mutants", "*.safetensors")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target / part, ignore=skip, symlinks=True)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, target / part)
    return target


def run_tests(
    tree: Path, tests: tuple[str, ...], test_limit_s: int = TEST_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """pytest in the copy, which imports the copy."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DFLASH"))}
    # Written bytecode is told apart by time and size alone: a mutation may change neither.
    env |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf"]
    argv += [f"--timeout={test_limit_s}", "--timeout-method=signal", *tests]
    return subprocess.run(
        argv, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The copy with the mistake in it."""
    before = {tree / edit.file: (tree / edit.file).read_text() for edit in mutant.edits}
    try:
        for edit in mutant.edits:
            text = (tree / edit.file).read_text()
            assert text.count(edit.old) == 1, (
                f"the patch {mutant.name} does not apply to {edit.file} any more: rewrite it in mutants.py"
            )
            changed = text.replace(edit.old, edit.new)
            compile(changed, edit.file, "exec")
            (tree / edit.file).write_text(changed)
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def catches(tree: Path, mutant: Mutant, test_limit_s: int = TEST_LIMIT_S) -> None:
    """Every named test has a failure (none an error in collecting it, which would catch anything)."""
    with mutated(tree, mutant):
        done = run_tests(tree, mutant.tests, test_limit_s)
    assert done.returncode == 1, f"not caught: {mutant.mistake}\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}"
    for test in mutant.tests:
        failed = re.search(rf"^FAILED {re.escape(test)}", done.stdout, re.MULTILINE)
        assert failed, f"{test} lets it pass: {mutant.mistake}\n{done.stdout[-3000:]}"


def test_names_are_unique_and_patches_apply(copy: Path) -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        with mutated(copy, mutant):
            pass


def test_the_named_tests_pass_without_a_mutation(copy: Path) -> None:
    done = run_tests(copy, tuple(dict.fromkeys(test for m in QUICK for test in m.tests)))
    assert done.returncode == 0, done.stdout[-4000:]
    imported = subprocess.run(
        [sys.executable, "-c", "import dflashctl; print(dflashctl.__file__)"],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(imported.stdout.strip()).is_relative_to(copy)


@pytest.mark.parametrize("mutant", QUICK, ids=lambda m: m.name)
def test_a_mistake_is_caught(copy: Path, mutant: Mutant) -> None:
    catches(copy, mutant)


@pytest.mark.soak
@pytest.mark.bed
@pytest.mark.parametrize("mutant", BED, ids=lambda m: m.name)
def test_a_mistake_is_caught_on_the_bed(copy: Path, mutant: Mutant) -> None:
    if os.geteuid() != 0:
        pytest.skip("DID NOT RUN: the bed's mutants. They need root, see tests/bed")
    done = run_tests(copy, mutant.tests, LIMIT_S)
    assert done.returncode == 0, f"fails without the mutation too:\n{done.stdout[-3000:]}"
    catches(copy, mutant, LIMIT_S)
