"""The whole deploy on engine `local`: the real agent in a real process, only without ssh and container.

Run: python -m pytest tests/local/test_deploy_local.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.config.resolve import read_recipe
from dflashctl.errors import Locked, Unreachable, UsageError, VerificationFailed
from dflashctl.releases import deploy as runs
from dflashctl.releases.deploy import read_source
from dflashctl.releases.desk import Desk

sys.path.insert(0, str(Path(__file__).parent))

from deploy_place import RECIPE, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_first_again_and_changed(place: Place) -> None:
    first = place.deploy()
    assert (first.sent_files, first.proof["switched"], first.proof["compiled"]) == (2, True, 2)
    again = place.deploy()
    assert (again.sent_files, again.archive_bytes, again.proof["switched"]) == (0, 0, False)
    place.write("prog/a.py", "graphs = False  # changed\n")
    changed = place.deploy()
    assert (changed.sent_files, changed.proof["before"]) == (1, first.proof["release"])
    assert changed.proof["expect"][0]["line"] == 1
    assert place.litter() == []


def test_progress_ends_with_all_bytes(place: Place) -> None:
    seen: list[tuple[int, int]] = []
    source = read_source(read_recipe(place.project / "recipes" / "warm.yaml"))
    done = runs.deploy(place.engine, source, progress=lambda now, total: seen.append((now, total)))
    assert seen[-1] == (done.archive_bytes, done.archive_bytes)


def test_a_syntax_error_stops_before_anything_travels(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_deliver(*args: object, **options: object) -> str:
        raise AssertionError("something travelled")

    place.write("prog/a.py", "def broken(:\n")
    monkeypatch.setattr(Desk, "deliver", no_deliver)
    with pytest.raises(VerificationFailed, match=r"prog/a\.py:1: SyntaxError"):
        place.deploy()
    assert place.current() is None


def test_a_release_pruned_between_facts_and_install_is_sent_after_all(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two people on two laptops can do to each other, at the worst moment."""
    import shutil

    place.deploy()
    place.write("prog/b.py", "b = 1\n")
    real = runs.read_facts

    def facts_then_gone(*args: object, **options: object) -> dict[str, object]:
        answer = real(*args, **options)  # type: ignore[arg-type]
        shutil.rmtree(place.root / "code" / "releases")
        return answer

    monkeypatch.setattr(runs, "read_facts", facts_then_gone)
    done = place.deploy()
    assert done.sent_files == 3
    assert done.proof["switched"]
    assert place.litter() == []


Deliver = Callable[..., str]


def nothing_arrives(
    real: Deliver, desk: Desk, pieces: Iterable[bytes], size: int, to: str, **more: Any
) -> str:
    """As `pct push` to a full disk or a missing folder: it says that all is well."""
    said = real(desk, pieces, size, to, **more)
    Path(to).unlink()
    return said


def half_arrives(real: Deliver, desk: Desk, pieces: Iterable[bytes], size: int, to: str, **more: Any) -> str:
    said = real(desk, pieces, size, to, **more)
    os.truncate(to, 50)
    return said


def cut_off(real: Deliver, desk: Desk, pieces: Iterable[bytes], size: int, to: str, **more: Any) -> str:
    def cut() -> Iterator[bytes]:
        yield b"x" * 50
        raise Unreachable("the connection was lost")

    return real(desk, cut(), size, to, **more)


def interrupted(real: Deliver, desk: Desk, pieces: Iterable[bytes], size: int, to: str, **more: Any) -> str:
    real(desk, pieces, size, to, **more)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (nothing_arrives, VerificationFailed, "the archive did not arrive"),
        (half_arrives, VerificationFailed, r"the archive arrived with 50 of \d+ bytes"),
        (cut_off, Unreachable, "the connection was lost"),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_a_push_that_goes_wrong_leaves_the_old_release_and_no_litter(
    place: Place,
    fault: Deliver,
    error: type[BaseException],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place.deploy()
    before = place.current()
    place.write("prog/a.py", "graphs = False  # new\n")
    real = Desk.deliver
    with monkeypatch.context() as patch:
        patch.setattr(Desk, "deliver", lambda *args, **more: fault(real, *args, **more))
        with pytest.raises(error, match=message) as caught:
            place.deploy()
    if error is KeyboardInterrupt:
        assert caught.value.__notes__ == ["nothing was switched; deploy again when you like"]
    assert place.current() == before
    assert place.litter() == []
    assert place.holder() is None
    assert place.deploy().proof["switched"]


def test_a_locked_place_is_its_own_error(place: Place) -> None:
    place.deploy()
    with Desk(place.engine, "warm 12345678"):
        assert place.holder() is not None
        with pytest.raises(Locked, match=r"\(warm 12345678\) is deploying here") as caught:
            place.deploy()
    assert caught.value.exit_code == 8
    assert place.holder() is None


def test_the_environments_pythonpath_cannot_come_before_the_release(place: Place) -> None:
    other = place.root / "other" / "prog"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    place.write(
        "recipes/warm.yaml", RECIPE.replace("launch: {", f"launch: {{env: {{PYTHONPATH: {other.parent}}}, ")
    )
    assert place.deploy().proof["imports"].startswith(str(place.root / "code" / "releases"))
    place.write("recipes/warm.yaml", RECIPE.replace("entry: prog", "entry: only"))
    (place.root / "other" / "only.py").write_text("")
    with pytest.raises(VerificationFailed, match="could not import only"):
        place.deploy()


def test_a_recipe_that_only_launches_has_nothing_to_deploy(place: Place) -> None:
    place.write("recipes/warm.yaml", "version: 1\nname: warm\nlaunch: {command: [/bin/true]}\n")
    with pytest.raises(UsageError, match="recipe warm has nothing to deploy"):
        place.deploy()


# --- the command line ---------------------------------------------------------------------------------------


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(place: Place) -> Command:
    place.write_hosts("here", "there", nowhere="/no/python")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return place.command("deploy", *words)

    return run


def test_what_a_person_sees(place: Place, command: Command) -> None:
    done = command()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    name = (place.root / "here" / "current").readlink().name
    assert lines[0] == f"here · warm · release {name[:8]}"
    assert lines[1] == "  compiled here     2 files"
    assert lines[2].startswith("  sent              2 of 2 files, ")
    assert lines[3].startswith("  verified inside   2 sha256, 2 compiled by " + sys.executable)
    assert lines[4] == "  expect            prog/a.py:1: graphs = False"
    assert lines[5] == f"  imports           prog from {place.root}/here/releases/{name[:8]}"
    assert lines[6] == f"  switched          current -> {name[:8]} (the first)"
    assert lines[7].startswith("deployed in ")
    assert "nothing to send" in command().stdout


def test_a_launch_says_that_the_files_here_are_others_than_the_deployed_ones(
    place: Place, command: Command
) -> None:
    words = ("launch", "--tag", "t", "--gpus", "none", "--dry-run")
    assert command().returncode == 0
    name = (place.root / "here" / "current").readlink().name
    same = place.command(*words)
    assert same.returncode == 0 and "differ" not in same.stderr, same.stderr
    place.write("prog/a.py", "graphs = False  # changed\n")
    said = f"the files here differ from release {name[:8]}: dflashctl diff · dflashctl deploy"
    assert said in place.command(*words).stderr
    place.write("prog/a.py", "graphs = False\n")
    assert "differ" not in place.command(*words).stderr


def test_dry_run_shows_the_plan_and_makes_nothing(place: Place, command: Command) -> None:
    done = command("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would send 2 of 2 files" in done.stdout
    assert not (place.root / "here").exists()


def test_json_for_programs(place: Place, command: Command) -> None:
    body = json.loads(command("--json").stdout)
    assert (body["schema"], body["host"], body["dry_run"]) == ("dflashctl.deploy/1", "here", False)
    assert body["proof"]["switched"] is True
    assert body["send"] == ["prog/__init__.py", "prog/a.py"]


def test_one_of_several_hosts_fails_and_the_others_are_done(place: Place, command: Command) -> None:
    done = command("-H", "here,nowhere,there")
    assert done.returncode == 10, done.stderr
    assert "1 of 3 hosts failed: nowhere" in done.stderr
    assert (place.root / "there" / "current").is_symlink()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("-H", "hree"), 6, "no host named 'hree'"),
        (("-r", "wram"), 6, "did you mean 'warm'?"),
        (("-H", "here,"), 2, "an empty name"),
        (("--wait", "-1"), 2, "wait"),
    ],
)
def test_mistakes_are_one_message(command: Command, words: tuple[str, ...], code: int, message: str) -> None:
    done = command(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
