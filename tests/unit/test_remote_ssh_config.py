"""~/.ssh/config: what is taken from it, and the way through jump hosts.

Run: python -m pytest tests/unit/test_remote_ssh_config.py
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from dflashctl.config.hosts import Host, Ssh
from dflashctl.errors import HostKeyChanged, Unreachable, UsageError
from dflashctl.remote import sshconfig
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.hops import Target, hops_of, target_of
from dflashctl.remote.hostkeys import UnknownHostKey
from dflashctl.remote.known_hosts import line_for

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box, Server, new_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "home-of-me"
    (made / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", tmp_path / "etc" / "ssh_config")
    return made


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


def write(home: Path, text: str, name: str = "config") -> None:
    (home / ".ssh" / name).write_text(text)


def lookup(home: Path, name: str) -> dict[str, object]:
    return dict(sshconfig.load().lookup(name))


@pytest.mark.parametrize("name", ["192.0.2.3", "2001:db8::1", "gpu.example.org", "other"])
def test_a_host_name_that_is_given_is_what_is_canonicalized(home: Path, name: str) -> None:
    """With CanonicalizeHostname for all hosts, HostName was lost: `the name gpu is not known`."""
    write(
        home,
        f"Host gpu\n HostName {name}\n Port 2222\nHost *\n CanonicalizeHostname yes\n"
        " CanonicalDomains invalid\n",
    )
    (hop,) = hops_of(Target(label="ct200", host="gpu"))
    assert hop.address == (name, 2222)


def test_names_are_canonicalized_in_no_domain_when_none_is_named(home: Path) -> None:
    write(home, "Host gpu\n HostName other\nHost *\n CanonicalizeHostname yes\n")
    (hop,) = hops_of(Target(label="ct200", host="gpu"))
    assert hop.address[0] == "other"


def test_names_ports_users_and_keys_come_from_the_configuration(home: Path) -> None:
    key = home / ".ssh" / "gpu_key"
    key.write_text("")
    write(
        home,
        "Host gpu\n HostName 192.0.2.3\n Port 2222\n User root\n IdentityFile ~/.ssh/gpu_key\n"
        " HostKeyAlias gpu-alias\n UserKnownHostsFile ~/a ~/b\n IdentitiesOnly yes\n",
    )
    (hop,) = hops_of(Target(label="ct200", host="gpu"))
    assert (hop.address, hop.user) == (("192.0.2.3", 2222), "root")
    assert hop.identity_files == [key]
    assert hop.identities_only
    assert hop.rules.alias == "gpu-alias"
    assert hop.rules.files[:2] == (home / "a", home / "b")
    assert hop.rules.store == home / "a"


def test_what_hosts_yaml_says_comes_first(home: Path) -> None:
    write(home, "Host gpu\n Port 2222\n User somebody\n UserKnownHostsFile ~/a\n")
    (hop,) = hops_of(
        Target(label="l", host="gpu", user="root", port=22, identity_file="~/k", known_hosts="~/kh")
    )
    assert (hop.address, hop.user) == (("gpu", 22), "root")
    assert hop.explicit_key == home / "k"
    assert hop.rules.files == (home / "kh",)


def test_without_a_configuration_the_defaults_are_those_of_openssh(home: Path) -> None:
    import getpass

    write(home, "", "id_ed25519")
    (hop,) = hops_of(Target(label="l", host="gpu"))
    assert (hop.address, hop.user) == (("gpu", 22), getpass.getuser())
    assert hop.identity_files == [home / ".ssh" / "id_ed25519"]
    assert hop.rules.files[0] == home / ".ssh" / "known_hosts"


def test_the_lab_s_target_does_not_look_at_the_configuration(home: Path) -> None:
    write(home, "Host *\n Port 1\n ProxyJump elsewhere\n")
    (hop,) = hops_of(Target(label="lab", host="127.0.0.1", port=5, use_ssh_config=False))
    assert hop.address == ("127.0.0.1", 5)


def test_settings_of_fabric_have_no_say(home: Path) -> None:
    (home / ".fabric.yaml").write_text("user: mallory\nport: 99\ngateway: evil\n")
    (hop,) = hops_of(Target(label="l", host="gpu", user="root"))
    assert (hop.address, hop.user) == (("gpu", 22), "root")


def test_included_files_count(home: Path) -> None:
    (home / ".ssh" / "config.d").mkdir()
    write(home, "Include config.d/*\nHost gpu\n  Port 1\n  Include nested\n  User late\n")
    write(home, "Host gpu\n  HostName first.example\n", "config.d/10-a")
    write(home, "Host other\n  Port 7\n", "config.d/20-b")
    write(home, "  User nested\n", "nested")
    found = lookup(home, "gpu")
    assert (found["hostname"], found["port"], found["user"]) == ("first.example", "1", "nested")
    assert lookup(home, "other")["port"] == "7"
    assert "port" not in lookup(home, "third")


def test_after_an_include_the_section_goes_on(home: Path) -> None:
    write(home, "Host gpu\n  Include other\n  Port 5\n")
    write(home, "Host elsewhere\n  User x\n", "other")
    assert lookup(home, "gpu")["port"] == "5"
    assert "port" not in lookup(home, "elsewhere")


def test_an_include_of_itself_is_refused(home: Path) -> None:
    write(home, "Include config\n")
    with pytest.raises(UsageError, match="deeper than"):
        sshconfig.load()


def test_a_configuration_that_does_not_parse_names_the_file(home: Path) -> None:
    write(home, "this is no configuration\n=\n")
    with pytest.raises(UsageError) as caught:
        hops_of(Target(label="l", host="gpu"))
    assert "config" in caught.value.where


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("", ["gpu"]),
        ("Host gpu\n ProxyJump none\n", ["gpu"]),
        ("Host gpu\n ProxyJump jump\n", ["jump", "gpu"]),
        ("Host gpu\n ProxyJump a,b\n", ["a", "b", "gpu"]),
        ("Host gpu\n ProxyJump jump\nHost jump\n ProxyJump outer\n", ["outer", "jump", "gpu"]),
        ("Host gpu\n ProxyJump a,b\nHost b\n ProxyJump outer\n", ["a", "b", "gpu"]),  # only the first hop's
        ("Host *\n ProxyJump jump\n", ["jump", "gpu"]),  # the jump host does not jump through itself
    ],
)
def test_jump_hosts_are_passed_in_openssh_s_order(home: Path, text: str, way: list[str]) -> None:
    write(home, text)
    hops = hops_of(Target(label="l", host="gpu"))
    assert [hop.name for hop in hops] == way
    for before, hop in itertools.pairwise(hops):
        assert hop.connection.gateway is before.connection
    assert not hops[0].connection.gateway


def test_a_jump_host_has_its_own_settings(home: Path) -> None:
    write(
        home,
        "Host gpu\n ProxyJump me@jump:2200\n UserKnownHostsFile ~/gpu_hosts\n"
        "Host jump\n HostName bastion.example\n UserKnownHostsFile ~/jump_hosts\n",
    )
    jump, gpu = hops_of(Target(label="l", host="gpu", identity_file="~/only_for_gpu"))
    assert (jump.address, jump.user) == (("bastion.example", 2200), "me")
    assert jump.rules.store == home / "jump_hosts"
    assert jump.explicit_key is None
    assert gpu.explicit_key == home / "only_for_gpu"


def test_jumps_in_a_circle_are_refused(home: Path) -> None:
    write(home, "Host gpu\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageError, match="circle: gpu -> a -> b -> a"):
        hops_of(Target(label="l", host="gpu"))


def test_a_target_needs_an_ssh_part(tmp_path: Path) -> None:
    values = {key: "/x" for key in ("python", "code_root", "workdir", "log_dir", "state_dir")}
    with pytest.raises(UsageError, match="needs the key 'ssh'"):
        target_of(Host(name="h", engine="ssh", **values))
    ssh = Ssh(host="gpu", user="root", port=2, identity_file="k", known_hosts="h", connect_timeout_s=3)
    assert target_of(Host(name="h", engine="ssh", ssh=ssh, **values)) == Target(
        "h", "gpu", "root", 2, "k", "h", 3.0
    )


@pytest.fixture
def way(home: Path, box: Box) -> Iterator[tuple[Box, Server, Target]]:
    """A jump host in front of the box, both in ~/.ssh/config."""
    jump_key = new_key(box.root / "jump_host_key")
    jump = Server(replace(box.service, host_key=jump_key))
    box.known_hosts.write_text(
        box.known_hosts.read_text() + line_for("jump-alias", jump_key.get_name(), jump_key.asbytes())
    )
    write(
        home,
        f"Host box jump\n HostName 127.0.0.1\n User root\n IdentityFile {box.root}/id_ed25519\n"
        f" UserKnownHostsFile {box.known_hosts}\n"
        f"Host box\n Port {box.port}\n ProxyJump jump\n"
        f"Host jump\n Port {jump.port}\n HostKeyAlias jump-alias\n",
    )
    yield box, jump, Target(label="ct200", host="box", connect_timeout_s=20.0)
    jump.close()


def test_commands_run_through_a_jump_host(way: tuple[Box, Server, Target]) -> None:
    box, jump, target = way
    connection = SshConnection(target)
    try:
        assert connection.run(["echo", "through"], timeout_s=20).stdout == b"through\n"
        assert connection.run(["head", "-c", "3000000", "/dev/zero"], timeout_s=20).stdout == bytes(3_000_000)
    finally:
        connection.close()
    assert (jump.accepted, box.server.accepted) == (1, 1)


def test_a_jump_host_s_unknown_key_is_told_as_its_own(way: tuple[Box, Server, Target]) -> None:
    box, _, target = way
    lines = box.known_hosts.read_text().splitlines(keepends=True)
    box.known_hosts.write_text("".join(line for line in lines if "jump" not in line))
    with pytest.raises(UnknownHostKey) as caught:
        SshConnection(target).run(["true"], timeout_s=20)
    assert "jump host jump" in caught.value.where
    assert "host trust ct200" in caught.value.next


def test_the_target_s_key_is_checked_behind_a_jump_host_too(way: tuple[Box, Server, Target]) -> None:
    box, _, target = way
    other = new_key(box.root / "other")
    lines = [line for line in box.known_hosts.read_text().splitlines(keepends=True) if "jump" in line]
    lines.append(line_for(f"[127.0.0.1]:{box.port}", other.get_name(), other.asbytes()))
    box.known_hosts.write_text("".join(lines))
    with pytest.raises(HostKeyChanged):
        SshConnection(target).run(["true"], timeout_s=20)


def test_a_jump_host_that_goes_away_is_a_lost_connection(way: tuple[Box, Server, Target]) -> None:
    _, jump, target = way
    connection = SshConnection(target, dead_after_s=3.0)
    drop = threading.Thread(target=jump.drop)
    try:
        with pytest.raises(Unreachable, match="may still be running"):
            connection.run(
                ["sh", "-c", "echo on; exec sleep 45"], timeout_s=60, on_stdout=lambda data: drop.start()
            )
        drop.join(20)
    finally:
        connection.close()


@pytest.mark.parametrize(
    "command",
    ["PYTHON RELAY %h %p", "PYTHON RELAY %h %p 2>/dev/null", 'PYTHON "$HOME/relay.py" %h "%p"'],
)
def test_a_proxy_command_is_run_as_openssh_does(command: str, home: Path, box: Box) -> None:
    relay = (
        "import os,socket,sys,threading;"
        "s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "back=lambda:[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')];"
        "threading.Thread(target=back,daemon=True).start();"
        "[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')]"
    )
    script = home / "relay.py"
    script.write_text(relay)
    command = command.replace("PYTHON", sys.executable).replace("RELAY", str(script))
    write(
        home,
        f"Host box\n HostName 127.0.0.1\n Port {box.port}\n User root\n"
        f" IdentityFile {box.root}/id_ed25519\n UserKnownHostsFile {box.known_hosts}\n"
        f" ProxyCommand {command}\n",
    )
    connection = SshConnection(Target(label="l", host="box"))
    try:
        assert connection.run(["echo", "relayed"], timeout_s=20).stdout == b"relayed\n"
    finally:
        connection.close()


def test_a_proxy_command_that_hands_over_a_connection_is_refused_with_what_to_do(home: Path) -> None:
    """It was run as one that carries bytes, and read as a server that does not answer as ssh does."""
    entry = "Host box\n HostName 127.0.0.1\n ProxyCommand nc -F %h %p\n"
    write(home, entry + " ProxyUseFdpass yes\n")
    with pytest.raises(UsageError, match="ProxyUseFdpass of box") as caught:
        SshConnection(Target("gpu", "box")).transport()
    assert caught.value.where == "~/.ssh/config" and "ProxyUseFdpass no" in caught.value.next
    for harmless in (" ProxyUseFdpass no\n", "Host box\n ProxyCommand none\n ProxyUseFdpass no\n"):
        write(home, entry + harmless)
        assert len(hops_of(Target("gpu", "box"))) == 1
    write(home, "Host box\n HostName 127.0.0.1\n ProxyUseFdpass yes\n")
    assert len(hops_of(Target("gpu", "box"))) == 1, "without a ProxyCommand it means nothing"


def test_a_proxy_command_that_ends_is_told_without_its_words(home: Path) -> None:
    write(home, "Host box\n HostName 127.0.0.1\n ProxyCommand sh -c 'exit 3 # sshpass -p hunter2'\n")
    connection = SshConnection(Target(label="l", host="box"))
    with pytest.raises(Unreachable, match="the ProxyCommand of box in ~/") as caught:
        connection.run(["true"], timeout_s=20)
    assert "hunter2" not in str(caught.value) and "next: check with: ssh box true" in str(caught.value)


def test_the_configuration_object_can_be_given(box: Box) -> None:
    config = paramiko.SSHConfig.from_text(f"Host gpu\n HostName 127.0.0.1\n Port {box.port}\n")
    connection = SshConnection(box.targeted(host="gpu", port=None), config=config)
    try:
        assert connection.run(["echo", "x"], timeout_s=10).stdout == b"x\n"
    finally:
        connection.close()
