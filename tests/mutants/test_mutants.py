"""Each mistake of mutants.py, made in a copy of the tree, must fail the tests that are named for it.

A test that nothing can fail proves nothing. The copy's tests pass without a mutation (checked first,
together), so a failure is the mutation's. Those that need the bed run under `make soak`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("dflashctl", "trainer", "tests", "recipes", "docs", "pyproject.toml", "hosts.yaml")
LIMIT_S = 240
TEST_LIMIT_S = 25
"""For one test, where it runs without the bed: some mistakes are waits without end."""
HUNG_LIMIT_S = 90
"""For one mutant: a mistake may also hang what tidies up after the test that was interrupted."""
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


@dataclass(frozen=True)
class Ran:
    """How pytest ended in the copy. `code` None: it hung and was killed."""

    code: int | None
    output: str


def run_tests(
    tree: Path, tests: tuple[str, ...], test_limit_s: int = TEST_LIMIT_S, limit_s: int = LIMIT_S
) -> Ran:
    """pytest in the copy, which imports the copy; in a session of its own, so that nothing of it stays."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DFLASH"))}
    # Written bytecode is told apart by time and size alone: a mutation may change neither.
    env |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf"]
    argv += [f"--timeout={test_limit_s}", "--timeout-method=signal", *tests]
    with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as any grandchild lives
        process = subprocess.Popen(
            argv,
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ran(code, output.read().decode(errors="replace"))


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
    """Every named test has a failure (none an error in collecting it, which would catch anything), or hangs:
    without the mistake the same tests end by themselves, well within the limit."""
    with mutated(tree, mutant):
        together = run_tests(tree, mutant.tests, test_limit_s, test_limit_s + HUNG_LIMIT_S)
        for test in mutant.tests:
            alone = together.code is None and len(mutant.tests) > 1  # which of them hung?
            done = run_tests(tree, (test,), test_limit_s, test_limit_s + HUNG_LIMIT_S) if alone else together
            failed = re.search(rf"^FAILED {re.escape(test)}", done.output, re.MULTILINE)
            assert done.code is None or (done.code == 1 and failed), (
                f"{test} lets it pass: {mutant.mistake}\n{done.output[-3000:]}"
            )


def test_names_are_unique_and_patches_apply(copy: Path) -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        with mutated(copy, mutant):
            pass


def test_the_named_tests_pass_without_a_mutation(copy: Path) -> None:
    done = run_tests(copy, tuple(dict.fromkeys(test for m in QUICK for test in m.tests)))
    assert done.code == 0, done.output[-4000:]
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
    assert done.code == 0, f"fails without the mutation too:\n{done.output[-3000:]}"
    catches(copy, mutant, LIMIT_S)
