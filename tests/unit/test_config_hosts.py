"""hosts.yaml: what is filled in, and what a mistake says.

Run: python -m pytest tests/unit/test_config_hosts.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hosts_kit import CT200, written

from dflashctl.config.hosts import DEFAULT_PATH, read_hosts
from dflashctl.errors import NotFound, UsageError

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _away_from_the_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DFLASHCTL_HOSTS", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def refused(tmp_path: Path, text: str) -> str:
    """The message for a broken file, its folder cut off."""
    with pytest.raises(UsageError) as caught:
        read_hosts(written(tmp_path, text))
    return str(caught.value).replace(f"{tmp_path}/", "")


# --- what is filled in --------------------------------------------------------------------------------------


def test_a_pct_host_needs_three_lines(tmp_path: Path) -> None:
    host = read_hosts(written(tmp_path, CT200)).host()
    assert host.name == "ct200"
    assert host.python == "/root/venv/bin/python"
    assert host.code_root == "/root/dflash"
    assert (host.workdir, host.log_dir, host.state_dir) == (
        "/workspace",
        "/workspace",
        "/workspace/.dflashctl",
    )
    assert host.path == DEFAULT_PATH
    assert host.keep_releases == 5
    assert host.ssh is not None
    assert host.ssh.connect_timeout_s == 10


def test_log_and_state_follow_the_workdir(tmp_path: Path) -> None:
    host = read_hosts(written(tmp_path, CT200 + "    workdir: /data/\n")).host()
    assert (host.workdir, host.log_dir, host.state_dir) == ("/data", "/data", "/data/.dflashctl")


def test_what_is_written_wins_over_defaults(tmp_path: Path) -> None:
    text = CT200 + "    workdir: /data\n    log_dir: /logs\n    python: /usr/bin/python3\n"
    host = read_hosts(written(tmp_path, text)).host()
    assert (host.log_dir, host.python) == ("/logs", "/usr/bin/python3")


def test_an_ssh_user_has_a_home_of_his_own(tmp_path: Path) -> None:
    text = "version: 1\nhosts:\n  box: {engine: ssh, ssh: {host: box, user: anna}}\n"
    hosts = read_hosts(written(tmp_path, text))
    assert hosts.defaults.host == "box"  # the only one that could be meant
    assert hosts.host().python == "/home/anna/venv/bin/python"


def test_a_local_host_lives_in_the_state_folder(tmp_path: Path) -> None:
    host = read_hosts(written(tmp_path, "version: 1\nhosts:\n  here: {engine: local}\n")).host("here")
    assert host.python == sys.executable
    assert host.code_root == str(tmp_path / "XDG_STATE_HOME/dflashctl/local/here/code")


def test_several_hosts_each_once_in_the_given_order(tmp_path: Path) -> None:
    text = "version: 1\nhosts:\n" + "".join(f"  {n}: {{engine: local}}\n" for n in "abc")
    hosts = read_hosts(written(tmp_path, text))
    assert [host.name for host in hosts.hosts("c,a,c")] == ["c", "a"]
    with pytest.raises(UsageError, match="an empty name"):
        hosts.hosts("a,,b")


def test_an_unknown_host_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, CT200))
    with pytest.raises(NotFound) as caught:
        hosts.host("ct20")
    assert caught.value.exit_code == 6
    assert "no host named 'ct20'" in str(caught.value)
    assert "did you mean 'ct200'? known hosts: ct200" in caught.value.next


def test_a_verb_for_one_host_says_so_when_it_is_given_several(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("version: 1\nhosts:\n  a: {engine: local}\n  b: {engine: local}\n")
    with pytest.raises(UsageError, match="one host at a time, not at 'b,a'") as caught:
        read_hosts(path).host("b,a")
    assert caught.value.next == "-H b"


def test_who_named_no_host_is_not_told_of_one(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, "version: 1\nhosts: {a: {engine: local}, b: {engine: lab}}\n"))
    for ask in (hosts.host, hosts.hosts):
        with pytest.raises(NotFound) as caught:
            ask()
        assert caught.value.what == "none of these hosts is the default one"
        assert caught.value.next == "name one with -H: a, b; or for always: defaults: {host: a}"


# --- what a mistake says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "    pyhton: /root/venv/bin/python",
            "hosts.yaml:9:5: unknown key: hosts.ct200.pyhton\nnext: did you mean 'python'?",
        ),
        (
            "    gpus: {expekt: 8}",
            "hosts.yaml:9:12: unknown key: hosts.ct200.gpus.expekt\nnext: did you mean 'expect'?",
        ),
        (
            "    keep_releases: many",
            "hosts.yaml:9:5: hosts.ct200.keep_releases: should be a valid integer, but is 'many' (text)",
        ),
        (
            "    keep_releases: yes",
            "hosts.ct200.keep_releases: should be a valid integer, but is true (true/false value)",
        ),
        (
            "    keep_releases: 0",
            "hosts.ct200.keep_releases: should be greater than or equal to 1, but is 0 (number)",
        ),
        (
            "    gpus: {idle: {memory_mib: little}}",
            "hosts.ct200.gpus.idle.memory_mib: should be 'auto' or a valid integer, but is 'little' (text)",
        ),
        (
            "    env: {A: 1}",
            'hosts.ct200.env.A: should be a valid string, but is 1 (number)\nnext: put it in quotes: "1"',
        ),
        (
            "    env: {3A: x}",
            "hosts.yaml:9:11: hosts.ct200.env.3A: '3A' cannot be the name of an environment variable",
        ),
        ("    workdir: data", "hosts.ct200.workdir: 'data' must be an absolute path, such as /workspace"),
        ("    workdir: ~/data", "must be an absolute path"),
        ("    workdir: /data/../etc", "must not contain '..'"),
        ("    container: 201", "hosts.yaml:9:5: not valid YAML: the key 'container' is given twice"),
        ("    keep_releases: 010", "hosts.yaml:9:20: 010 is the number 8 to YAML\n"),
        ("    keep_releases: 1:30", "hosts.yaml:9:20: 1:30 is the number 90 to YAML\n"),
        ("    log_dir: [", "hosts.yaml:10:1: not valid YAML"),
        ("\tlog_dir: /x", "hosts.yaml:9:1: not valid YAML"),
    ],
)
def test_a_wrong_key_is_named_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    assert message in refused(tmp_path, CT200 + line + "\n")


def test_several_mistakes_are_all_named_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = CT200.replace("version: 1", "version: 2") + "    wordkir: /x\n    keep_releases: x\n"
    said = refused(tmp_path, text)
    assert [said.index(part) for part in ("version", "wordkir", "keep_releases")] == sorted(
        said.index(part) for part in ("version", "wordkir", "keep_releases")
    )
    assert "hosts.yaml:2:1: version: should be 1, but is 2" in said
    assert "upgrade" in said or "another dflashctl" in said


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{engine: pct, container: 200}", "engine pct needs the key 'ssh'"),
        ("{engine: pct, ssh: {host: a}}", "engine pct needs the key 'container'"),
        ("{engine: ssh, ssh: {host: ''}}", "hosts.h.ssh.host: must not be empty"),
        ("{engine: ssh}", "engine ssh needs the key 'ssh'"),
        ("{engine: local, container: 100}", "engine local has no container"),
        ("{engine: local, ssh: {host: a}}", "engine local is this machine"),
        ("{engine: docker}", "h.engine: should be 'pct', 'ssh', 'lab' or 'local', but is 'docker'"),
        ("{}", "missing key: hosts.h.engine"),
        ("null", "hosts.h: should be keys and values, but is null"),
        ("{engine: pct, ssh: box, container: 200}", "'box' (text)\nnext: write ssh: {host: box}"),
        ("{engine: local, gpus: 8}", "8 (number)\nnext: write gpus: {expect: 8}"),
        ("{engine: local, gpus: true}", "hosts.h.gpus: should be keys and values, but is true"),
    ],
)
def test_an_engine_says_what_it_needs(tmp_path: Path, entry: str, message: str) -> None:
    assert message in refused(tmp_path, f"version: 1\nhosts:\n  h: {entry}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts.yaml must be a mapping of keys and values, but this is empty"),
        ("- a\n", "but this holds a list"),
        ("version: 1\n", "missing key: hosts"),
        ("version: 1\nhosts: {}\n", "hosts: "),
        ("hosts: {h: {engine: lab}}\n", "missing key: version\nnext: write version: 1"),
        ("version: 1\nhosts: {'a,b': {engine: lab}}\n", "'a,b' is not allowed"),
        (
            "version: 1\ndefaults: {host: x}\nhosts: {lab: {engine: lab}}\n",
            "hosts.yaml:2:18: defaults.host: no host",
        ),
        ("version: 1\nhosts: {lab: {engine: lab}}\n\x01", "a character that YAML does not allow"),
        ("a: " + "[" * 5000, "hosts.yaml"),
        ("when: 2024-13-45\n", "hosts.yaml"),
    ],
)
def test_a_file_that_is_no_hosts_file(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_bytes(b"version: 1\nhosts: {\xff: 1}\n")
    with pytest.raises(UsageError, match=r"hosts\.yaml:2: is not UTF-8 text"):
        read_hosts(tmp_path / "hosts.yaml")


def test_merge_keys_and_anchors_are_fine(tmp_path: Path) -> None:
    text = """
version: 1
hosts:
  a: &base {engine: pct, container: 200, ssh: {host: x}}
  b: {<<: *base, container: 201}
"""
    hosts = read_hosts(written(tmp_path, text))
    assert (hosts.host("a").container, hosts.host("b").container) == (200, 201)


# --- the shipped file ---------------------------------------------------------------------------------------


def test_the_shipped_file_has_the_lab_as_default_and_a_box_with_its_real_values() -> None:
    hosts = read_hosts(PROJECT / "hosts.yaml")
    assert hosts.names == ["ct200", "lab"]
    assert (hosts.defaults.host, hosts.defaults.recipe) == ("lab", "demo")
    box = hosts.host("ct200")
    assert (box.engine, box.container, box.gpus.expect) == ("pct", 200, 8)
    bare = box.model_copy(update={"env": {}, "gpus": box.gpus.model_copy(update={"expect": None})})
    shortest = read_hosts_of("ct200: {engine: pct, container: 200, ssh: {host: proxmox-gpu, user: root}}")
    assert bare == shortest, "the file says that it shows the defaults"


def read_hosts_of(entry: str) -> object:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_hosts(written(Path(folder), f"version: 1\nhosts:\n  {entry}\n")).host()


def test_reading_hosts_needs_neither_ssh_nor_torch() -> None:
    code = (
        "import sys; from dflashctl.config import load_hosts; load_hosts();"
        "print([m for m in ('fabric', 'paramiko', 'torch', 'trainer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [("host", "root:hunter2@box"), ("host", "ssh://root:hunter2@box:22"), ("user", "root:hunter2")],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(tmp_path: Path, key: str, value: str) -> None:
    """It stood in every hint: check with: ssh root:hunter2@box true."""
    ssh = "".join(
        f"      {name}: '{each}'\n" for name, each in ({"host": "2001:db8::1"} | {key: value}).items()
    )
    said = refused(tmp_path, "version: 1\nhosts:\n  a:\n    engine: ssh\n    ssh:\n" + ssh)
    assert f"hosts.a.ssh.{key}: holds a password" in said and "hunter2" not in said


@pytest.mark.parametrize("key", ["host", "user"])
@pytest.mark.parametrize("value", ["-oProxyCommand=x", "a b", "a\\nb", "a\\u202eb"])
def test_an_address_stands_in_commands_and_messages_as_it_is(tmp_path: Path, key: str, value: str) -> None:
    ssh = {"host": "box", "user": "ann"} | {key: value}
    said = refused(
        tmp_path,
        "version: 1\nhosts:\n  a:\n    engine: ssh\n    ssh:\n"
        + "".join(f'      {name}: "{each}"\n' for name, each in ssh.items()),
    )
    assert f"hosts.a.ssh.{key}: " in said and "no name or address" in said and len(said.splitlines()) == 1
