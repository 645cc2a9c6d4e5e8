"""rollback, releases, diff and lock, as a person types them; engine `local`.

Run: python -m pytest tests/local/test_release_verbs.py
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from dflashctl.errors import Locked
from dflashctl.releases.desk import Desk

sys.path.insert(0, str(Path(__file__).parent))

from deploy_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.write_hosts("code")
    return made


def two_releases(place: Place) -> tuple[str, str]:
    first = place.deploy().proof["release"]
    place.write("prog/a.py", "graphs = False\nnew = 1\n")
    return first, place.deploy().proof["release"]


# --- rollback -----------------------------------------------------------------------------------------------


def test_rollback_and_forth(place: Place) -> None:
    first, second = two_releases(place)
    done = place.command("rollback")
    assert done.returncode == 0, done.stderr
    assert f"switched          current -> {first[:8]} (before: {second[:8]}, kept)" in done.stdout
    assert f"imports           prog from {place.root}/code/releases/{first}" in done.stdout
    assert place.current() == first
    assert place.command("rollback", second[:6]).returncode == 0
    assert place.current() == second
    assert place.litter() == [] and place.holder() is None


def test_rollback_dry_run_switches_nothing(place: Place) -> None:
    first, second = two_releases(place)
    done = place.command("rollback", "--dry-run")
    assert f"would switch      current -> {first[:8]} (now: {second[:8]})" in done.stdout
    assert place.current() == second


def test_a_release_that_was_changed_is_not_gone_back_to(place: Place) -> None:
    first, second = two_releases(place)
    (place.root / "code" / "releases" / first / "prog" / "a.py").write_text("sabotage = 1\n")
    done = place.command("rollback")
    assert done.returncode == 4
    assert f"release {first[:8]} was changed in place; nothing switched" in done.stderr
    assert "prog/a.py: sha256 is" in done.stderr
    assert place.current() == second


def test_rollback_says_what_there_is(place: Place) -> None:
    done = place.command("rollback")
    assert (done.returncode, "nothing was ever deployed here" in done.stderr) == (6, True)
    only = place.deploy().proof["release"]
    done = place.command("rollback")
    assert done.returncode == 6
    assert "there is no release before the current one" in done.stderr
    assert "next: nothing else is there: deploy another\n" in done.stderr and only[:8] not in done.stderr
    done = place.command("rollback", "0000")
    assert (done.returncode, "no release starts with '0000'" in done.stderr) == (6, True)
    done = place.command("rollback", "../../etc")
    assert (done.returncode, "is not a release" in done.stderr) == (2, True)


# --- releases -----------------------------------------------------------------------------------------------


def test_releases_are_listed_newest_first(place: Place) -> None:
    assert "nothing is deployed" in place.command("releases").stdout
    first, second = two_releases(place)
    lines = place.command("releases").stdout.splitlines()
    assert lines[1].split() == ["RELEASE", "AGE", "BY", "GIT", "RECIPE", "FILES", "STATE"]
    assert lines[2].startswith(second[:8]) and lines[2].endswith("current")
    assert lines[3].startswith(first[:8]) and lines[3].endswith("previous")
    body = json.loads(place.command("releases", "--json").stdout)
    assert [row["release"] for row in body["releases"]] == [second, first]
    (place.root / "code" / "releases" / first / ".dflash-release.json").write_text("{")
    assert "damaged" in place.command("releases").stdout


# --- diff ---------------------------------------------------------------------------------------------------


def test_diff_shows_what_a_deploy_would_change(place: Place) -> None:
    place.deploy()
    same = place.command("diff")
    assert same.returncode == 0 and same.stdout.startswith("no difference between here and release ")
    place.write("prog/a.py", "graphs = False\nmore = 2")
    place.write("prog/new.py", "x = 1\n")
    (place.project / "prog" / "__init__.py").unlink()
    place.write("prog/__main__.py", "\x00binary")
    text = place.command("diff").stdout
    assert "+more = 2\n\\ No newline at end of file\n" in text
    assert "--- /dev/null\n+++ prog/new.py\n@@ -0,0 +1 @@\n+x = 1\n" in text
    assert "prog/__main__.py differs (binary, 7 bytes)" in text
    assert "only in " in text and "4 files here differ from release" in text


def test_diff_shows_modes_and_drift(place: Place) -> None:
    release = place.deploy().proof["release"]
    (place.project / "prog" / "a.py").chmod(0o755)
    there = place.root / "code" / "releases" / release / "prog"
    (there / "a.py").write_text("graphs = False\nedited = 'inside'\n")
    (there / "extra.py").write_text("")
    text = place.command("diff").stdout
    assert "mode 100644 -> 100755" in text and "-edited = 'inside'" in text
    assert "changed inside since it was deployed (drift)" in text
    assert "  prog/extra.py: is not in the manifest" in text
    body = json.loads(place.command("diff", "--json").stdout)
    assert [file["path"] for file in body["files"]] == ["prog/a.py"]
    assert len(body["drift"]) == 2


def test_diff_against_an_older_release_and_none(place: Place) -> None:
    done = place.command("diff")
    assert (done.returncode, "no release is current here" in done.stderr) == (6, True)
    first, _ = two_releases(place)
    assert "+new = 1" in place.command("diff", first[:8]).stdout


# --- lock ---------------------------------------------------------------------------------------------------


def test_the_lock_is_shown_and_broken(place: Place) -> None:
    place.deploy()
    assert "code: nobody is deploying" in place.command("lock", "show").stdout
    assert place.command("lock", "break", "--yes").returncode == 0
    ended: list[object] = []
    with pytest.raises(Locked, match=r"the deploy lock was broken by .*@"):  # noqa: SIM117
        with Desk(place.engine, "warm 12345678") as desk:
            shown = place.command("lock", "show")
            assert "has been deploying warm 12345678 for " in shown.stdout
            assert json.loads(place.command("lock", "show", "--json").stdout)["holder"]["pid"] > 0
            asked = place.command("lock", "break")
            assert asked.returncode != 0 and place.holder() is not None, "nobody said yes"
            broken = place.command("lock", "break", "--yes")
            assert broken.returncode == 0, broken.stderr
            assert broken.stdout.endswith("the lock is free\n")
            ended.append(threading.Event().wait(0.5))
            desk.check()
    assert place.holder() is None
    assert place.deploy().proof["switched"] is False


def test_a_broken_deploy_switches_nothing_and_takes_its_archive_back(place: Place, tmp_path: Path) -> None:
    place.deploy()
    before = place.current()
    place.write("prog/a.py", "graphs = False  # another\n")
    real = Desk.deliver

    def deliver(desk: Desk, *args: object, **more: object) -> str:
        said = real(desk, *args, **more)  # type: ignore[arg-type]
        assert place.command("lock", "break", "--yes").returncode == 0
        threading.Event().wait(0.5)
        return said

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Locked, match="was broken by"):
        patch.setattr(Desk, "deliver", deliver)
        place.deploy()
    assert (place.current(), place.litter(), place.holder()) == (before, [], None)
    assert place.deploy().proof["switched"]
