"""A recipe with one script and an absolute place for it: proven aside, renamed over.

Run: python -m pytest tests/local/test_deploy_script.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflashctl.agent.releases import script
from dflashctl.errors import UsageError, VerificationFailed

sys.path.insert(0, str(Path(__file__).parent))

from deploy_place import Place

RECIPE = """
version: 1
name: warm
deploy:
  include: [train.py]
  to: {to}
  expect: [{{file: train.py, text: "graphs = False"}}]
launch: {{command: [python, {to}]}}
"""


class Script(Place):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.to = root / "inside" / "train_it.py"
        self.to.parent.mkdir()
        self.write("recipes/warm.yaml", RECIPE.format(to=self.to))
        self.write("train.py", "graphs = False\n")

    def beside(self) -> list[str]:
        return sorted(path.name for path in self.to.parent.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_first_again_and_changed(place: Script) -> None:
    first = place.deploy()
    assert place.to.read_text() == "graphs = False\n"
    assert (first.proof["switched"], first.proof["before"], first.proof["to"]) == (True, None, str(place.to))
    again = place.deploy()
    assert (again.sent_files, again.proof["switched"]) == (0, False)
    inode = place.to.stat().st_ino
    place.write("train.py", "graphs = False\nmore = 1\n")
    changed = place.deploy()
    assert (changed.sent_files, changed.proof["before"]) == (1, first.proof["release"])
    assert place.to.stat().st_ino != inode, "renamed over, never written in place"
    assert place.beside() == ["train_it.py"]
    assert not (place.root / "code" / "current").exists(), "a script is no switch of the whole place"


@pytest.mark.parametrize(
    ("text", "message"),
    [("graphs = (\n", r"train\.py:1: SyntaxError"), ("graphs = None\n", r"no line has: graphs = False")],
)
def test_what_cannot_be_proven_is_not_put_there(place: Script, text: str, message: str) -> None:
    place.deploy()
    place.write("train.py", text)
    with pytest.raises(VerificationFailed, match=message):
        place.deploy()
    assert place.to.read_text() == "graphs = False\n"
    assert place.beside() == ["train_it.py"]


@pytest.mark.parametrize("to", ["file/train.py", "loop/train.py", "loop", "nowhere/train.py"])
def test_a_place_that_cannot_be_is_said_before_anything_travels(place: Script, to: str) -> None:
    (place.root / "file").write_text("")
    (place.root / "loop").symlink_to("loop")
    place.write("recipes/warm.yaml", RECIPE.format(to=place.root / to))
    place.write_hosts("code")
    done = place.command("deploy")
    assert done.returncode == 4 and str(place.root / to.split("/")[0]) in done.stderr, done.stderr


def test_a_hand_edited_script_is_seen_and_replaced(place: Script) -> None:
    place.write_hosts("code")
    place.deploy()
    place.to.write_text("graphs = False\nhand = 1\n")
    shown = place.command("diff").stdout
    assert "-hand = 1" in shown and f"{place.to}: is no version that was deployed here" in shown
    done = place.command("deploy")
    assert done.returncode == 0, done.stderr
    assert f"  switched          {place.to} is " in done.stdout
    assert place.to.read_text() == "graphs = False\n"


def test_a_link_stays_a_link_and_the_mode_travels(place: Script) -> None:
    real = place.root / "elsewhere.py"
    real.write_text("old = 1\n")
    place.to.symlink_to(real)
    (place.project / "train.py").chmod(0o755)
    place.deploy()
    assert place.to.is_symlink() and real.read_text() == "graphs = False\n"
    assert real.stat().st_mode & 0o777 == 0o755


def test_a_place_that_is_the_source_itself_keeps_its_content(place: Script) -> None:
    """The laptop's folder is the container's, over a bind mount: one inode on both sides."""
    place.write("recipes/warm.yaml", RECIPE.format(to=place.project / "train.py"))
    place.deploy()
    assert (place.project / "train.py").read_text() == "graphs = False\n"


def test_folders_that_are_not_there_and_things_that_are_no_file(place: Script) -> None:
    place.write("recipes/warm.yaml", RECIPE.format(to=place.root / "nowhere" / "x.py"))
    with pytest.raises(VerificationFailed, match="there is no such folder; nothing switched"):
        place.deploy()
    place.write("recipes/warm.yaml", RECIPE.format(to=place.to.parent))
    with pytest.raises(VerificationFailed, match="is not a file, so it is not ours to replace"):
        place.deploy()


def test_litter_of_a_killed_deploy_is_swept(place: Script) -> None:
    (place.to.parent / ".train_it.py.dflash-dead").write_text("half")
    place.deploy()
    assert place.beside() == ["train_it.py"]


@pytest.mark.parametrize("include", ["[train.py, other.py]", "['*.py']"])
def test_to_is_for_one_file(place: Script, include: str) -> None:
    text = RECIPE.format(to=place.to).replace("[train.py]", include)
    place.write("recipes/warm.yaml", text)
    with pytest.raises(UsageError, match="'to' is for a single script"):
        place.deploy()


def test_the_file_in_place_tells_its_release(place: Script) -> None:
    name = place.deploy().proof["release"]
    assert script.current({"to": str(place.to), "path": "train.py"}) == name


def test_the_script_of_a_live_run_is_not_swapped_under_it(place: Script) -> None:
    place.write_hosts("code")
    (place.root / "work").mkdir()
    place.write("train.py", "graphs = False\nimport time\ntime.sleep(600)\n")
    assert place.command("deploy").returncode == 0
    name = script.current({"to": str(place.to), "path": "train.py"})
    launched = place.command("launch", "--tag", "long", "--json")
    assert launched.returncode == 0 and launched.stderr == "", launched.stderr
    started = json.loads(launched.stdout)
    assert started["release"] == name and started["outcome"] == "started"
    try:
        assert place.command("deploy").returncode == 0, "the same content is no swap"
        place.write("train.py", "graphs = False\n")
        refused = place.command("deploy")
        assert refused.returncode == 8 and "(tag long) is live and runs this file" in refused.stderr
        assert "next: dflashctl kill long" in refused.stderr and "sleep" in place.to.read_text()
    finally:
        killed = place.command("kill", "long")
    assert killed.returncode == 0, killed.stderr
    assert place.command("deploy").returncode == 0
    assert place.to.read_text() == "graphs = False\n" and place.beside() == ["train_it.py"]


def test_a_run_records_the_script_that_it_runs_whoever_put_it_there(place: Script) -> None:
    """The record named no code: `runs show` and `runs diff` could not tell two of them apart."""
    (place.root / "work").mkdir()
    place.write_hosts("code")
    assert place.command("deploy").returncode == 0
    by_deploy = script.current({"to": str(place.to), "path": "train.py"})
    assert place.command("launch", "--tag", "a", "--wait").returncode == 0
    place.to.write_text("graphs = False\nhand = 1\n")
    by_hand = script.current({"to": str(place.to), "path": "train.py"})
    edited = place.command("launch", "--tag", "b", "--wait")
    assert edited.returncode == 0 and f"{place.to} is no version that was deployed here" in edited.stderr
    records = [json.loads(place.command("runs", "show", tag, "--json").stdout) for tag in ("a", "b")]
    assert [record["release"] for record in records] == [by_deploy, by_hand]
    place.to.unlink()
    gone = place.command("launch", "--tag", "c", "--wait")
    assert gone.returncode == 7 and "is no version that was deployed here" in gone.stderr


def test_scripts_are_counted_apart_and_push_no_release_out(place: Script) -> None:
    """With keep_releases 2 a few deploys of a script left nothing that a rollback could name."""
    place.write(
        "recipes/whole.yaml", "version: 1\nname: whole\ndeploy: {include: [a.py]}\nlaunch: {command: [a]}\n"
    )
    second = place.root / "inside" / "second.py"
    place.write("recipes/second.yaml", RECIPE.format(to=second).replace("name: warm", "name: second"))
    place.write_hosts("code")
    hosts = place.project / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace("engine: local", "engine: local, keep_releases: 2"))

    def versions(recipe: str, file: str, count: int) -> list[str]:
        names = []
        for number in range(count):
            place.write(file, f"graphs = False\nx = '{recipe}', {number}\n")
            done = place.command("deploy", "-r", recipe, "--json")
            assert done.returncode == 0, done.stderr
            names.append(json.loads(done.stdout)["release"])
        return names

    other = versions("second", "train.py", 1)
    whole = versions("whole", "a.py", 4)
    scripts = versions("warm", "train.py", 4)
    listed = json.loads(place.command("releases", "--json").stdout)
    there = {row["release"]: row["to"] for row in listed["releases"]}
    assert there == {
        **{name: [] for name in whole[2:]},
        **{name: [str(place.to)] for name in scripts[2:]},
        other[0]: [str(second)],
    }
    assert (listed["current"], listed["previous"]) == (whole[3], whole[2])
    refused = place.command("rollback", scripts[2])
    assert refused.returncode == 2 and f"is a single script, for {place.to}" in refused.stderr, refused.stderr
    assert json.loads(place.command("releases", "--json").stdout)["current"] == whole[3]
    assert place.command("rollback", whole[2]).returncode == 0
