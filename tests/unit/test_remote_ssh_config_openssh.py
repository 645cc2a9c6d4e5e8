"""~/.ssh/config: the same answers as OpenSSH's own client gives (`ssh -G`), where paramiko's reader differs.

Run: python -m pytest tests/unit/test_remote_ssh_config_openssh.py
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from unproven import did_not_run

from dflashctl.errors import UsageError
from dflashctl.remote import matchexec, sshconfig
from dflashctl.remote.hops import Target, address, hops_of

SUB = "Port 2201\nHost other\n Port 99\nHost gpu\n HostName h.example\n"

# text of the configuration, host, what ssh -G says; SSH stands for the folder, `sub` is included from there.
CASES: list[tuple[str, str, dict[str, str]]] = [
    ("Host work\n Include SSH/sub\nHost *\n User z\n", "gpu", {"hostname": "gpu", "port": "22", "user": "z"}),
    ("Host work\n Include SSH/sub\n", "work", {"hostname": "work", "port": "2201"}),
    ("Match originalhost gpu\n Include SSH/sub\n", "gpu", {"hostname": "h.example", "port": "2201"}),
    ("Match originalhost gpu\n Include SSH/sub\n", "other", {"port": "22"}),
    ('Match localuser nobody-here\n Include SSH/sub\n', "gpu", {"hostname": "gpu", "port": "22"}),
    ("Host g* !gpu\n Include SSH/sub\n", "gpu", {"hostname": "gpu", "port": "22"}),
    ("Match all\n Include SSH/sub\n", "other", {"port": "2201"}),
    ("Include SSH/sub # mine\nHost gpu\n User b # c\n", "gpu", {"hostname": "h.example", "user": "b"}),
    ("Host gpu # the box\n Port 3 # three\n", "gpu", {"port": "3"}),
    ("Host gpu # the box\n Port 3\n", "the", {"port": "22"}),
    ("Host gpu\n ProxyCommand nc %h %p # kept\n", "gpu", {"proxycommand": "nc %h %p # kept"}),
    ("Match host=gpu\n Port 44\n", "gpu", {"port": "44"}),
    ("Host gpu\n User bob\nMatch Host gpu User=bob\n Port 44\n", "gpu", {"port": "44"}),
    ("Host gpu\n ProxyCommand nc\nHost *\n ProxyJump j\n", "gpu", {"proxycommand": "nc", "proxyjump": ""}),
    ("Host gpu\n ProxyCommand none\nHost *\n ProxyJump j\n", "gpu", {"proxycommand": "", "proxyjump": ""}),
    ("Host gpu\n ProxyJump none\nHost *\n ProxyCommand nc\n", "gpu", {"proxycommand": "nc", "proxyjump": ""}),
    ("Host gpu\n ProxyJump j\nHost gpu\n ProxyCommand nc\n", "gpu", {"proxycommand": "", "proxyjump": "j"}),
    ('Host "gpu" x\n User "ann"\n Port \'7\'\n', "gpu", {"user": "ann", "port": "7"}),
    ("Host 2001:db8::5\n Port 7\n", "2001:db8::5", {"hostname": "2001:db8::5", "port": "7"}),
    ("Host gpu\n IdentityAgent %d/agent-%h\n HostName h\n", "gpu", {"identityagent": "HOME/agent-h"}),
    ("Host gpu\n UserKnownHostsFile ${WHERE}/a %d/%n-%k\n HostName h\n HostKeyAlias k\n", "gpu",
     {"userknownhostsfile": "/where it is/a HOME/gpu-k"}),
    ('Host gpu\n UserKnownHostsFile "/tmp/a b" "/tmp/c"\n', "gpu", {"userknownhostsfile": "/tmp/a b /tmp/c"}),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "home of me"
    (made / ".ssh").mkdir(parents=True)
    (made / ".ssh" / "sub").write_text(SUB)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("WHERE", "/where it is")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", tmp_path / "etc" / "ssh_config")
    return made


def write(home: Path, text: str) -> Path:
    file = home / ".ssh" / "config"
    quoted = f'"{home}/.ssh/sub"'
    file.write_text(text.replace("SSH/sub", quoted))
    return file


def ours(name: str) -> dict[str, Any]:
    *before, hop = hops_of(Target(label="l", host=name))
    gateway = hop.connection.gateway
    files = [str(path) for path in hop.rules.files if not str(path).startswith("/etc/ssh/")]
    return {
        "hostname": hop.address[0],
        "port": str(hop.address[1]),
        "user": hop.user,
        "proxyjump": ",".join(each.name for each in before),
        "proxycommand": gateway if isinstance(gateway, str) else "",
        "identityagent": hop.agent_socket,
        "userknownhostsfile": " ".join(files),
    }


@pytest.mark.parametrize(("text", "name", "wanted"), CASES)
def test_a_configuration_means_here_what_it_means_to_openssh(
    home: Path, text: str, name: str, wanted: dict[str, str]
) -> None:
    write(home, text)
    found = ours(name)
    if wanted.get("proxycommand"):  # ours is ready to run
        wanted = {**wanted, "proxycommand": wanted["proxycommand"].replace("%h", "gpu").replace("%p", "22")}
    assert {key: found[key] for key in wanted} == {
        key: value.replace("HOME", str(home)) for key, value in wanted.items()
    }


def test_openssh_itself_says_so(home: Path) -> None:
    if shutil.which("ssh") is None:
        did_not_run("comparing with OpenSSH's client. apt install openssh-client")
    for text, name, wanted in CASES:
        argv = ["ssh", "-F", str(write(home, text)), "-G", name]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        # It asks the password file for the home, not the environment.
        own = pwd.getpwuid(os.getuid()).pw_dir
        told = {key: said.get(key, "").replace(own, "HOME") for key in wanted}
        told = {key: value.replace(str(home), "HOME") for key, value in told.items()}
        if said.get("proxycommand") == "none":
            told["proxycommand"] = ""
        assert {key: told[key] for key in wanted} == wanted, text


@pytest.mark.parametrize(
    "key", ["${WHERE}/k", "%d/.ssh/k-%n-%%", '"~/.ssh/my key"', "'~/.ssh/my key' # mine"]
)
def test_names_of_keys_are_expanded(home: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("WHERE", str(home))
    there = {home / "k", home / ".ssh" / "k-gpu-%", home / ".ssh" / "my key"}
    for path in there:
        path.write_text("")
    write(home, f"Host gpu\n IdentityFile {key}\n")
    (hop,) = hops_of(Target(label="l", host="gpu"))
    assert len(hop.identity_files) == 1 and set(hop.identity_files) <= there


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host gpu\n Include o'brien\n", "line 2"),
        ("Host gpu\n UserKnownHostsFile ~/o'brien\n", "line 2"),
        ('Host "gpu\n', "line 1"),
        ("Host gpu\n Port abc\n", "'abc'"),
        ("Host gpu\n Port 0\n", "'0'"),
        ("Host # none\n", "host"),
        ("Match host\n", "host"),
        ("Host gpu\n ProxyJump j:x\n", "'x' is no port"),
    ],
)
def test_what_openssh_refuses_is_told_with_its_place(home: Path, text: str, said: str) -> None:
    write(home, text)
    with pytest.raises(UsageError) as caught:
        hops_of(Target(label="l", host="gpu"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("gpu", None, "gpu", None),
        ("ann@gpu:2222", "ann", "gpu", 2222),
        ("ann@lan@gpu", "ann@lan", "gpu", None),
        ("2001:db8::1", None, "2001:db8::1", None),
        ("ann@[2001:db8::1]:2222", "ann", "2001:db8::1", 2222),
        ("[2001:db8::1]", None, "2001:db8::1", None),
        ("ssh://ann@gpu:2222", "ann", "gpu", 2222),
        ("ssh://[::1]/", None, "::1", None),
    ],
)
def test_addresses(text: str, user: str | None, host: str, port: int | None) -> None:
    assert address(text) == (host, user, port)


def test_a_jump_host_may_be_written_as_an_address_or_uri(home: Path) -> None:
    write(
        home,
        "Host gpu\n ProxyJump ssh://bob@jump:2222,ann@[2001:db8::1]:2200\n"
        "Host 2001:db8::*\n IdentitiesOnly yes\n",
    )
    first, second, _ = hops_of(Target(label="l", host="gpu"))
    assert (first.user, first.address) == ("bob", ("jump", 2222))
    assert (second.user, second.address) == ("ann", ("2001:db8::1", 2200))
    assert second.identities_only and not first.identities_only


@pytest.mark.parametrize("code", [0, 1])
def test_match_exec_is_run_once_a_connection_and_hears_and_says_nothing(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """invoke would read what the person pipes to dflashctl; pytest's stdin refuses to be read at all."""
    monkeypatch.setenv("SHELL", "/bin/sh")
    script = f"echo shown; echo %n %h $(cat) >> '{home}/runs'; exit {code}"
    write(home, f'Match originalhost gpu exec "{script}"\n Port 44\n')
    for number in (1, 2):
        (hop,) = hops_of(Target(label="l", host="gpu"))
        assert hop.address == ("gpu", 22 if code else 44)
        assert (home / "runs").read_text() == "gpu gpu\n" * number
    assert capfd.readouterr().out == ""


def test_a_match_exec_without_end_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchexec, "TIMEOUT_S", 0.2)
    write(home, 'Match exec "exec sleep 60"\n Port 44\n')
    with pytest.raises(UsageError, match=r"'exec sleep 60' did not end within 0.2 s"):
        hops_of(Target(label="l", host="gpu"))
