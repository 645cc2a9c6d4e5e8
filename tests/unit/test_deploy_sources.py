"""Which files a deploy takes, and that it takes them as they were at one moment.

Run: python -m pytest tests/unit/test_deploy_sources.py
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflashctl.config.recipe import Deploy
from dflashctl.errors import UsageError, VerificationFailed
from dflashctl.releases import sources
from dflashctl.releases.globs import glob_regex, may_match_below, secret_reason, unfit_name
from dflashctl.releases.sources import Snapshot, take_snapshot

sys.path.insert(0, str(Path(__file__).parent))

from install_box import write_archive
from sources_kit import git, refused, taken, tree

# --- git that tells nothing ---------------------------------------------------------------------------------


def test_why_git_tells_nothing_is_known_where_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No repository, and one without a commit, are no trouble; one of another user, or no git, is."""
    outside, inside = tree(tmp_path / "outside", a_py="1"), tree(tmp_path / "inside", sub__a_py="1")
    assert take_snapshot(Deploy(include=["**"]), outside).git_problem == ""
    subprocess.run(["git", "init", "-q", str(inside)], check=True)
    assert take_snapshot(Deploy(include=["**"]), inside / "sub").git_problem == ""
    (inside / ".git" / "HEAD").write_text("nonsense")
    broken = take_snapshot(Deploy(include=["sub/**"]), inside)
    assert broken.git is None and broken.git_problem.startswith("fatal: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert take_snapshot(Deploy(include=["sub/**"]), inside).git_problem == "git is not installed"
    assert take_snapshot(Deploy(include=["**"]), outside).git_problem == ""


# --- globs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("trainer/**", "trainer/a.py", True),
        ("trainer/**", "trainer/a/b.py", True),
        ("trainer/**", "trainers/a.py", False),
        ("trainer", "trainer/a/b.py", True),
        ("trainer/", "trainer/a.py", True),
        ("./trainer", "trainer/a.py", True),
        ("*.py", "a.py", True),
        ("*.py", "sub/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "x/y/a.py", True),
        ("a/**/b.py", "a/b.py", True),
        ("a/**/b.py", "a/x/y/b.py", True),
        ("a?.py", "ab.py", True),
        ("a?.py", "a/.py", False),
        ("[ab].py", "b.py", True),
        ("[!ab].py", "b.py", False),
        ("a+b(1).py", "a+b(1).py", True),
        ("a.py", "axpy", False),
        ("**", ".hidden/x", True),
        (".", "any/thing", True),
        ("a\n.py", "a\n.py", True),
    ],
)
def test_globs(pattern: str, path: str, hit: bool) -> None:
    assert bool(glob_regex(pattern).match(path)) is hit


names = st.text(st.sampled_from("ab.*?["), min_size=1, max_size=4)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(paths, paths)
@example("./.", "a/b")
def test_a_walk_never_passes_by_a_folder_that_a_pattern_means(pattern: str, path: str) -> None:
    if glob_regex(pattern).match(path):
        for depth in range(1, path.count("/") + 1):
            assert may_match_below("/".join(path.split("/")[:depth]), [pattern])


@given(paths)
def test_a_path_without_wildcards_matches_itself(path: str) -> None:
    plain = path.replace("*", "x").replace("?", "y").replace("[", "z")
    assert glob_regex(plain).match(plain) or plain.startswith("./") or plain.strip(".") == ""


# --- what is taken ------------------------------------------------------------------------------------------


def test_include_exclude_and_what_never_travels(tmp_path: Path) -> None:
    tree(tmp_path, p__a_dot_py="", p__b_dot_txt="", p____pycache____c_dot_pyc="", p__x_dot_pyc="", q__d="")
    assert taken(tmp_path, "p/**") == ["p/a.py", "p/b.txt"]
    assert taken(tmp_path, "p", "q", exclude=("**/*.txt",)) == ["p/a.py", "q/d"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, a_dot_py="", mine__b_dot_py="", lib__c_dot_py="")
    real = os.scandir

    def refuse(folder: Path) -> object:
        if Path(folder).name == "mine":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "mine/ cannot be read: Permission denied" in refused(tmp_path, "**")
    assert taken(tmp_path, "lib/**", "a.py") == ["a.py", "lib/c.py"], "nobody means it: nobody looks"


def test_git_says_commit_and_how_many_deployed_files_differ(tmp_path: Path) -> None:
    project = tree(tmp_path / "mono" / "proj", a_dot_py="1", b_dot_py="2", other_dot_txt="3")
    git(tmp_path / "mono", "init", "-q")
    git(tmp_path / "mono", "add", "-A")
    git(tmp_path / "mono", "commit", "-qm", "one")
    tree(project, a_dot_py="changed", other_dot_txt="changed", new_dot_py="new")
    snapshot = take_snapshot(Deploy(include=["*.py"]), project)
    assert snapshot.git is not None
    said, count = snapshot.git.describe({file.path for file in snapshot.files})
    assert (said["dirty"], count) == (True, 2)
    assert len(str(said["commit"])) == 40


def test_modes_links_empty_files_and_empty_folders(tmp_path: Path) -> None:
    tree(tmp_path, run_dot_sh="x", empty="", d__e="")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("d/e")
    (tmp_path / "dlink").symlink_to("d")
    (tmp_path / "hollow").mkdir()
    snapshot = take_snapshot(Deploy(include=["**"]), tmp_path)
    assert {file.path: (file.mode, file.link) for file in snapshot.files} == {
        "d/e": ("100644", None),
        "dlink": ("120000", "d"),
        "empty": ("100644", None),
        "hollow": ("040000", None),
        "link": ("120000", "d/e"),
        "run.sh": ("100755", None),
    }


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/etc/passwd", "link is a link that leaves the tree (to /etc/passwd)"),
        ("../x", "link is a link that leaves the tree (to ../x)"),
        ("nothing", "link is a link to nothing, which is not deployed"),
    ],
)
def test_links_that_lead_out_are_refused(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "link").symlink_to(target)
    assert message in refused(tmp_path)


def test_what_goes_to_a_script_s_place_is_a_file(tmp_path: Path) -> None:
    """An empty folder of that name was sent, and became a release, before its rename failed."""
    deploy = Deploy(include=["a.py"], to="/root/a.py")
    (tmp_path / "a.py").mkdir()
    for make in (lambda: None, (tmp_path / "a.py/b.py").touch, (tmp_path / "a.py/a.py").touch):
        make()
        with pytest.raises(UsageError, match=r"deploy\.to: a\.py is not a file"):
            take_snapshot(deploy, tmp_path)
    shutil.rmtree(tmp_path / "a.py")
    (tmp_path / "a.py").touch()
    assert [file.path for file in take_snapshot(deploy, tmp_path).files] == ["a.py"]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is neither a file nor a link" in refused(tmp_path)


@pytest.mark.parametrize("name", ["a\nb.py", "tab\t.py", "bell\x07", ".dflash-release.json"])
def test_names_that_cannot_travel_are_refused_and_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    said = refused(tmp_path)
    assert "cannot travel" in said
    assert ascii(name) in said
    assert "\n\n" not in said


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.py", "wb"):
        pass
    assert "'caf\\udce9.py' cannot travel: it is not UTF-8" in refused(tmp_path)


def test_odd_names_that_can_travel_do(tmp_path: Path) -> None:
    for name in ("with space.py", "ümläut-文.py", "quote'\".py", "-dash", "$HOME", "back\\slash", "a;b&c"):
        (tmp_path / name).write_text(name)
        assert unfit_name(name) is None
    assert len(taken(tmp_path)) == 7


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.local",
        "server.pem",
        "tls.key",
        "id_rsa",
        "id_ed25519",
        "id_ecdsa_sk",
        "credentials",
        "credentials.json",
        ".netrc",
        "token",
        "hf_token.txt",
        "store.p12",
        ".git-credentials",
    ],
)
def test_what_looks_like_a_secret_stays_unless_it_is_named(tmp_path: Path, name: str) -> None:
    tree(tmp_path, a_dot_py="")
    (tmp_path / name).write_text("hush")
    assert f"{name} looks like a secret" in refused(tmp_path)
    assert taken(tmp_path, "a.py", name) == sorted(["a.py", name])


@pytest.mark.parametrize(
    "name",
    [".env.example", "id_map.py", "credentials.py", "tokenizer.json", "token.py", "id_rsa.pub", "keys.py"],
)
def test_what_only_sounds_like_a_secret_travels(name: str) -> None:
    assert secret_reason(f"some/{name}", b"text") is None


def test_a_private_key_under_any_name_is_noticed(tmp_path: Path) -> None:
    tree(tmp_path, notes_dot_txt="-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    assert "notes.txt looks like a secret (it starts like a private key)" in refused(tmp_path)


# --- one moment ---------------------------------------------------------------------------------------------


def test_the_same_files_have_the_same_release_wherever_they_lie(tmp_path: Path) -> None:
    tree(tmp_path / "one", a_dot_py="1", d__b="2")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    os.utime(tmp_path / "two" / "a.py", (1, 1))
    one, two = (take_snapshot(Deploy(include=["**"]), tmp_path / name) for name in ("one", "two"))
    assert one.release == two.release
    (tmp_path / "two" / "a.py").chmod(0o755)
    assert take_snapshot(Deploy(include=["**"]), tmp_path / "two").release != one.release


def test_a_file_that_changes_while_the_others_are_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, a_dot_py="1", b_dot_py="2")
    real = sources._read_one
    rounds: list[str] = []

    def read_and_touch(root: Path, path: str, **options: Any) -> Any:
        result = real(root, path, **options)
        if path == "b.py":  # a.py was read before and changes now
            rounds.append(path)
            (root / "a.py").write_text("changed" * len(rounds))
        return result

    monkeypatch.setattr(sources, "_read_one", read_and_touch)
    with pytest.raises(VerificationFailed, match=r"a\.py changed while it was being read; nothing was sent"):
        take_snapshot(Deploy(include=["**"]), tmp_path)
    assert len(rounds) == sources.ATTEMPTS


def test_a_file_that_settles_is_taken_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, a_dot_py="1", b_dot_py="2")
    real = sources._read_one
    changed = False

    def read_and_touch_once(root: Path, path: str, **options: Any) -> Any:
        nonlocal changed
        result = real(root, path, **options)
        if path == "b.py" and not changed:
            changed = True
            (root / "a.py").write_text("later")
        return result

    monkeypatch.setattr(sources, "_read_one", read_and_touch_once)
    snapshot = take_snapshot(Deploy(include=["**"]), tmp_path)
    assert snapshot.files[0].content == b"later"


def test_a_large_file_is_not_kept_and_is_proven_when_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"x" * (sources.KEEP_FILE_BYTES + 1))
    snapshot = take_snapshot(Deploy(include=["**"]), tmp_path)
    assert snapshot.files[0].content is None
    assert write_archive(snapshot, snapshot.files, tmp_path / "ok.tar") > 0
    (tmp_path / "w.bin").write_bytes(b"y" * (sources.KEEP_FILE_BYTES + 1))
    for damage in (
        lambda: None,
        lambda: (tmp_path / "w.bin").write_bytes(b"short"),
        (tmp_path / "w.bin").unlink,
    ):
        damage()
        with pytest.raises(VerificationFailed, match=r"w\.bin changed while it was being read"):
            write_archive(snapshot, snapshot.files, tmp_path / "bad.tar")


def test_the_archive_names_contents_by_hash_and_holds_each_once(tmp_path: Path) -> None:
    import tarfile

    tree(tmp_path / "src", a="same", b="same", c="other")
    snapshot: Snapshot = take_snapshot(Deploy(include=["**"]), tmp_path / "src")
    write_archive(snapshot, snapshot.files, tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == sorted({file.sha256 for file in snapshot.files})
