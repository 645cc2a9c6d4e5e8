"""What a deploy leaves here: what git ignores, and what editors and desktops put beside files.

Run: python -m pytest tests/unit/test_deploy_ignored.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sources_kit import git, refused, taken, tree


def test_gitignore_is_honoured_at_every_level_and_the_deepest_decides(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="*.log\n/out/\n", a_dot_log="", b_dot_py="", out__x="", sub__c_dot_log="")
    (tmp_path / "sub" / ".gitignore").write_text("!c.log\nsecret*\n")
    tree(tmp_path, sub__secret_dot_py="", sub__d__secret2="", sub__out__y="")
    assert taken(tmp_path) == [".gitignore", "b.py", "sub/.gitignore", "sub/c.log", "sub/out/y"]


def test_an_ignored_file_that_is_named_in_full_travels(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="weights/\n", weights__w_dot_bin="x", weights__v_dot_bin="y", a_dot_py="")
    assert taken(tmp_path, "a.py", "weights/w.bin") == ["a.py", "weights/w.bin"]


def test_a_pattern_that_only_finds_ignored_files_says_so(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="out/\n", out__x="", a_dot_py="")
    assert "'out/**' matches no file that git does not ignore (such as out" in refused(
        tmp_path, "out/**", "a.py"
    )
    assert "'trianer/**' matches no file below" in refused(tmp_path, "a.py", "trianer/**")


def test_a_tracked_file_travels_although_a_pattern_ignores_it(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="gen/\n*.tmp\n", gen__kept_dot_py="1", gen__not_dot_py="2", x_dot_tmp="3")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-f", "gen/kept.py", ".gitignore")
    git(tmp_path, "commit", "-qm", "one")
    assert taken(tmp_path) == [".gitignore", "gen/kept.py"]


IGNORES = {
    "all but": "*\n!*.py\n!*/\n!.gitignore\n",  # a library of patterns gets this one wrong
    "byte order mark": "\ufeff*.log\n",
    "form feed": "a.py\x0cb.py\nx\u2028y\n",
    "carriage returns": "*.log\r\nsub/\r\n",
    "again": "sub/*\n!sub/c.py\n",
}


@pytest.mark.parametrize("text", IGNORES.values(), ids=IGNORES.keys())
def test_what_travels_is_what_git_itself_would_take(tmp_path: Path, text: str) -> None:
    tree(
        tmp_path, a_dot_py="", a_dot_log="", mine="", sub__c_dot_py="", sub__c_dot_log="", w_dot_glob="", x=""
    )
    (tmp_path / ".gitignore").write_bytes(text.encode())
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "rules").write_text("*.glob\n")
    git(tmp_path, "config", "core.excludesFile", str(tmp_path / "rules"))
    (tmp_path / ".git" / "info" / "exclude").write_text("mine\n")
    argv = ["git", "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"]
    git_s = subprocess.run(argv, capture_output=True, check=True).stdout.decode().split("\0")
    found = taken(tmp_path)
    assert found == sorted(path for path in git_s if path)
    assert "mine" not in found and "w.glob" not in found


@pytest.mark.parametrize("name", ["byte order mark", "carriage returns", "form feed"])
def test_a_gitignore_without_a_repository_has_git_s_lines(tmp_path: Path, name: str) -> None:
    tree(tmp_path, a_dot_py="", a_dot_log="", x="")
    (tmp_path / ".gitignore").write_bytes(IGNORES[name].encode())
    assert ("a.log" in taken(tmp_path)) == (name == "form feed") and "a.py" in taken(tmp_path)


def test_a_repository_within_has_its_own_rules_and_an_ignored_empty_folder_stays(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="*.log\nempty/\n", a_dot_py="", lib__a_dot_log="", lib__b_dot_tmp="")
    (tmp_path / "empty").mkdir()
    (tmp_path / "lib" / ".gitignore").write_text("*.tmp\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    git(tmp_path / "lib", "init", "-q")
    assert taken(tmp_path) == [".gitignore", "a.py", "lib/.gitignore", "lib/a.log"]


@pytest.mark.parametrize(
    "name",
    [".DS_Store", "._a.py", ".#a.py", "#a.py#", ".a.py.swp", ".a.py.swo", "a.py~", "Thumbs.db",
     "desktop.ini", ".nfs000000000012f3a900000001"],
)  # fmt: skip
def test_what_editors_and_desktops_leave_stays_here(tmp_path: Path, name: str) -> None:
    """Emacs's lock refused every deploy while a file was open, macOS's `._a.py` did not compile, and a swap
    file made another release of the same sources."""
    tree(tmp_path, p__a_dot_py="", empty__keep="")
    (tmp_path / "empty/keep").unlink()
    clean = taken(tmp_path)
    for folder in ("p", "empty"):
        (tmp_path / folder / name).symlink_to("me@laptop.4711:1700000000")
    assert taken(tmp_path) == clean == ["empty", "p/a.py"]
    (tmp_path / "p" / name).unlink()
    (tmp_path / "p" / name).write_text("text")
    assert taken(tmp_path, "p") == ["p/a.py"]
    assert taken(tmp_path, "p", f"p/{name}") == sorted(["p/a.py", f"p/{name}"]), "who names it means it"
    (tmp_path / "p" / name).unlink()
    (tmp_path / "p" / name).mkdir()
    assert taken(tmp_path, "p") == sorted(["p/a.py", f"p/{name}"]), "a folder is nobody's litter"


def test_litter_that_git_tracks_travels(tmp_path: Path) -> None:
    tree(tmp_path, a_dot_py="")
    (tmp_path / "a.py~").write_text("old")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py~")
    git(tmp_path, "commit", "-qm", "one")
    assert taken(tmp_path) == ["a.py", "a.py~"]


def test_gitignore_above_the_project_counts_within_the_repository(tmp_path: Path) -> None:
    tree(tmp_path, _dot_gitignore="*.dat\n")  # outside of the repository: not git's business
    mono = tree(tmp_path / "mono", _dot_gitignore="*.log\n", proj__a_dot_log="", proj__b_dot_dat="")
    git(mono, "init", "-q")
    assert taken(mono / "proj") == ["b.dat"]
