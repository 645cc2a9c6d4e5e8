"""hosts.yaml: which machines there are and how to get inside them. The one place of each host default."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflashctl.config.names import Address, InsidePath, Name, User, Value, Variable
from dflashctl.config.problems import nearest, usage_error, validate
from dflashctl.config.yamlfile import Document, read_document
from dflashctl.errors import NotFound, UsageError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

DEFAULT_STAGING = "/var/tmp"
"""On the Proxmox host: where an archive lies, in a folder of its own, until `pct push` has taken it. On disk:
/tmp is often memory."""

EngineName = Literal["pct", "ssh", "lab", "local"]


class Strict(BaseModel):
    """An unknown key is an error, never ignored; a value has the written type, never a guessed one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Ssh(Strict):
    """How to reach the host. `host` may be a name from ~/.ssh/config: jump hosts and keys live there."""

    host: Address = Field(min_length=1)  # a name from ~/.ssh/config, a host name or an address
    user: User | None = None  # left out: as ~/.ssh/config says, else your own name
    port: int | None = Field(default=None, ge=1, le=65535)  # left out: as ~/.ssh/config says, else 22
    identity_file: str | None = None  # a private key; it alone is offered then
    known_hosts: str | None = None  # left out: ~/.ssh/known_hosts
    connect_timeout_s: float = Field(default=10.0, gt=0)  # for the connection, and for the peer's banner
    sudo: bool = False  # a user other than root: commands go through `sudo -n`


class IdleRule(Strict):
    """When a GPU counts as idle: no holder, memory at its learnt baseline (`auto`) or below so many MiB."""

    memory_mib: Literal["auto"] | int = "auto"  # auto: what `dflashctl gpu --learn-idle` has learnt, else 0
    utilization_pct: int = Field(default=5, ge=0, le=100)  # the most that the samples' median may be
    samples: int = Field(default=3, ge=1, le=100)  # looks at a GPU, whose median counts


class Gpus(Strict):
    """What the box should have."""

    expect: int | None = Field(default=None, ge=0)  # how many; a missing one is told by status and doctor
    uuids: list[str] | None = None  # for `doctor`: a card that was swapped is told
    idle: IdleRule = Field(default_factory=IdleRule)  # when a GPU counts as idle


class HostEntry(Strict):
    """A host as written in hosts.yaml. What is left out comes from `default_values`."""

    engine: EngineName  # how to get inside: pct over ssh, plain ssh, the embedded lab, or this machine
    container: int | None = Field(default=None, ge=100, le=999_999_999)  # engine pct: as `pct list` shows it
    ssh: Ssh | None = None  # engines pct and ssh need it: how to reach the host
    python: InsidePath | None = None  # the interpreter that runs the training and proves deploys
    home: InsidePath | None = None  # HOME of every command
    path: Value | None = None  # PATH of every command
    code_root: InsidePath | None = None  # releases/ and current live here
    workdir: InsidePath | None = None  # where a run without a release starts
    log_dir: InsidePath | None = None  # of the runs' logs; left out: workdir
    state_dir: InsidePath | None = None  # runs/ lives here; left out: below workdir
    staging_dir: InsidePath = DEFAULT_STAGING  # engine pct, on the host: an archive waits here for its push
    gpus: Gpus = Field(default_factory=Gpus)  # what the box should have
    env: dict[Variable, Value] = Field(default_factory=dict)  # of every run; a recipe's own comes over it
    keep_releases: int = Field(default=5, ge=1)  # how many releases stay after a deploy

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> HostEntry:
        if self.engine in ("pct", "ssh") and self.ssh is None:
            raise ValueError(f"engine {self.engine} needs the key 'ssh', such as ssh: {{host: my-gpu-box}}")
        if self.engine == "pct" and self.container is None:
            raise ValueError("engine pct needs the key 'container', such as container: 200")
        if self.engine in ("ssh", "local") and self.container is not None:
            raise ValueError(f"engine {self.engine} has no container; remove the key or use engine: pct")
        if self.engine == "local" and self.ssh is not None:
            raise ValueError("engine local is this machine; remove the key 'ssh' or use engine: ssh")
        return self


class Host(Strict):
    """One host, defaults filled in. `name` is its key in hosts.yaml. All paths are absolute and inside, but
    `staging_dir`, which is on the Proxmox host."""

    name: str
    engine: EngineName
    container: int | None = None
    ssh: Ssh | None = None
    python: str
    home: str = "/root"
    path: str = DEFAULT_PATH
    code_root: str
    workdir: str
    log_dir: str
    state_dir: str
    staging_dir: str = DEFAULT_STAGING
    gpus: Gpus = Field(default_factory=Gpus)
    env: dict[str, str] = Field(default_factory=dict)
    keep_releases: int = 5


class Defaults(Strict):
    """What a command uses when neither --host nor --recipe is given."""

    host: Name = "lab"  # left out where hosts.yaml has a single host: that one
    recipe: Name = "demo"  # left out: the recipe named demo


class HostsDocument(Strict):
    """The whole of hosts.yaml."""

    version: Literal[1]  # of this format
    defaults: Defaults = Field(default_factory=Defaults)  # for commands without --host and --recipe
    hosts: dict[Name, HostEntry] = Field(min_length=1)  # by the name that --host takes


@dataclass(frozen=True)
class HostsFile:
    """A checked hosts.yaml; `path` is None for the built-in one, which knows only `lab`."""

    path: Path | None
    document: HostsDocument

    @property
    def defaults(self) -> Defaults:
        return self.document.defaults

    @property
    def names(self) -> list[str]:
        return sorted(self.document.hosts)

    def host(self, name: str | None = None) -> Host:
        """The host with that name, or the default one. Raises NotFound (exit 6) listing the names."""
        wanted = self.defaults.host if name is None else name
        entry = self.document.hosts.get(wanted)
        if entry is None and name is None:
            raise NotFound(
                "none of these hosts is the default one",
                where=str(self.path),
                next=f"name one with -H: {', '.join(self.names)};"
                f" or for always: defaults: {{host: {self.names[0]}}}",
            )
        if entry is None and "," in wanted:
            one = next((part for part in wanted.split(",") if part in self.document.hosts), self.names[0])
            raise UsageError(f"this looks at one host at a time, not at {wanted!r}", next=f"-H {one}")
        if entry is None:
            close = nearest(wanted, self.names)
            hint = f"did you mean '{close}'? " if close else ""
            elsewhere = "" if self.path else f"{NO_HOSTS_FILE}; "
            raise NotFound(
                f"no host named {wanted!r}",
                where=str(self.path or "built-in hosts"),
                next=f"{elsewhere}{hint}known hosts: {', '.join(self.names)}",
            )
        return complete(wanted, entry)

    def hosts(self, names: str | None = None) -> list[Host]:
        """The hosts of a `-H a,b` option, in that order, each once; the default host for None."""
        if names is None:
            return [self.host()]
        wanted = [part.strip() for part in names.split(",")]
        if not all(wanted):
            raise UsageError(f"an empty name in --host {names!r}", next="separate names by one comma: -H a,b")
        return [self.host(name) for name in dict.fromkeys(wanted)]


def complete(name: str, entry: HostEntry) -> Host:
    """Fill in what the entry leaves out. Raises UsageError when a default makes no sense together with it."""
    written = {k: v for k, v in entry if v is not None and k in entry.model_fields_set}
    values = default_values(name, entry) | written
    try:
        return Host.model_validate({"name": name, **values})
    except ValidationError as error:
        raise UsageError(f"cannot be completed: {error}", where=f"hosts.{name}") from None


def default_values(name: str, entry: HostEntry) -> dict[str, Any]:
    """The defaults of an engine, as values of Host's fields."""
    if entry.engine == "lab":
        from dflashctl.lab.state import lab_defaults  # the lab is imported only by those who use it

        return dict(lab_defaults())
    if entry.engine == "local":
        base = _local_base() / name
        workdir = entry.workdir or str(base / "work")
        return {
            "python": sys.executable,
            "home": str(Path.home()),
            "code_root": str(base / "code"),
            "workdir": workdir,
            "log_dir": workdir,
            "state_dir": str(base / "state"),
        }
    user = entry.ssh.user if entry.ssh else None
    sudo_or_root = entry.engine == "pct" or user in (None, "root") or bool(entry.ssh and entry.ssh.sudo)
    home = entry.home or ("/root" if sudo_or_root else f"/home/{user}")
    workdir = entry.workdir or "/workspace"
    return {
        "python": f"{home}/venv/bin/python",
        "home": home,
        "code_root": f"{home}/dflash",
        "workdir": workdir,
        "log_dir": workdir,
        "state_dir": f"{workdir}/.dflashctl",
    }


def own_workdir(host: Host) -> bool:
    """Whether its workdir is the folder of ours that engine `local` has by itself: a launch makes it."""
    return host.engine == "local" and host.workdir == str(_local_base() / host.name / "work")


def _local_base() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("dflashctl")).absolute() / "local"


NO_HOSTS_FILE = "go to the folder of your hosts.yaml (none is here or above), or set DFLASHCTL_HOSTS"


def load_hosts(start: Path | None = None) -> HostsFile:
    """Find and check hosts.yaml.

    Looked for in DFLASHCTL_HOSTS, in `start` (the working folder) or above, in the XDG configuration folder;
    without any, a built-in file with only `lab` serves. Raises UsageError (exit 2) for a broken file.
    """
    path = find_hosts(start or Path.cwd())
    if path is None:
        return HostsFile(None, HostsDocument(version=1, hosts={"lab": HostEntry(engine="lab")}))
    return read_hosts(path)


def find_hosts(start: Path) -> Path | None:
    """The hosts.yaml that applies in `start`. Raises UsageError for a thing of that name that is no file:
    whoever made it meant it, and the machines of another one further up would not be theirs."""
    named = os.environ.get("DFLASHCTL_HOSTS")
    if named:
        path = Path(named).expanduser()
        if not _is_there(path):
            raise UsageError(
                f"no such file: {path}", where="DFLASHCTL_HOSTS", next="mend the variable or unset it"
            )
        return path.absolute()
    for folder in (start.absolute(), *start.absolute().parents):
        if _is_there(folder / "hosts.yaml"):
            return folder / "hosts.yaml"
    import platformdirs

    configured = Path(platformdirs.user_config_dir("dflashctl")) / "hosts.yaml"
    return configured if _is_there(configured) else None


def _is_there(path: Path) -> bool:
    """Whether a file stands there. Raises UsageError for anything else of that name."""
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    what = "a folder" if path.is_dir() else "no ordinary file"
    if not path.exists():
        what = f"a link to {path.readlink()}, which is not there"
    raise UsageError(f"it is {what}", where=str(path), next="put a hosts.yaml there, or move that away")


def read_hosts(path: Path) -> HostsFile:
    """Check one hosts.yaml. Raises UsageError with file, line and key path."""
    document = read_document(path)
    checked = validate(HostsDocument, document, kind="hosts.yaml")
    if "host" in checked.defaults.model_fields_set:
        _check_default_host(checked, document)
    elif "lab" not in checked.hosts and len(checked.hosts) == 1:  # there is only one host that could be meant
        only = checked.defaults.model_copy(update={"host": next(iter(checked.hosts))})
        checked = checked.model_copy(update={"defaults": only})
    return HostsFile(path, checked)


def _check_default_host(checked: HostsDocument, document: Document) -> None:
    wanted = checked.defaults.host
    if wanted not in checked.hosts:
        close = nearest(wanted, checked.hosts)
        hint = f"did you mean '{close}'?" if close else f"known hosts: {', '.join(sorted(checked.hosts))}"
        where = document.position(("defaults", "host"), of_key=False)
        raise usage_error([(where, f"defaults.host: no host named {wanted!r}", hint)])
