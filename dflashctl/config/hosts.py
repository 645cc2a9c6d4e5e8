"""hosts.yaml: which machines there are and how to get inside them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Strict(BaseModel):
    """An unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Ssh(Strict):
    """How to reach the host; `host` may be a name from ~/.ssh/config (jump hosts, keys and ports live there)."""

    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    connect_timeout_s: float = 10.0
    sudo: bool = False


class IdleRule(Strict):
    """When a GPU counts as idle: no holder, memory at its learnt baseline (`auto`) or below a number of MiB."""

    memory_mib: Literal["auto"] | int = "auto"
    utilization_pct: int = 5
    samples: int = 3


class Gpus(Strict):
    """What the box should have."""

    expect: int | None = None
    idle: IdleRule = Field(default_factory=IdleRule)


class Host(Strict):
    """One entry of hosts.yaml, defaults filled in. `name` is its key."""

    name: str
    engine: Literal["pct", "ssh", "lab", "local"]
    container: int | None = None
    ssh: Ssh | None = None
    python: str
    home: str = "/root"
    path: str = DEFAULT_PATH
    code_root: str
    workdir: str
    log_dir: str
    state_dir: str
    gpus: Gpus = Field(default_factory=Gpus)
    env: dict[str, str] = Field(default_factory=dict)
    keep_releases: int = 5
