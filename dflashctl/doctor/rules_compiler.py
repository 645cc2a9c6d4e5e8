"""Whether Triton can build the small C program that starts its kernels, where runs live. Pure."""

from __future__ import annotations

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok
from dflashctl.doctor.rules_cuda import for_gpus
from dflashctl.runs.facts import listed, text

MEANS = (
    "Triton builds a small C program at its first kernel: torch.compile and other programs end there, "
    "and the trainer goes on without kernels, slower and with more memory"
)


def compiler(facts: Facts) -> Finding:
    """A compiler by Triton's own rule (CC, else clang or gcc), tried on the headers that it needs."""
    said = facts.said("compiler")
    if not said:
        return not_known("no Python of runs answered: see packages")
    if not for_gpus(facts) or facts.host.gpus.expect == 0:
        return ok(
            f"not needed: {'no GPU is expected' if for_gpus(facts) else 'this torch is a build for CPUs'}"
        )
    command, version = text(said.get("command")), listed(said.get("python"))
    if not said.get("found"):
        if command:
            mend = f"install it, or take CC out of `env` of hosts.{facts.host.name}"
            return failure(f"CC names {command}, and there is no such program", MEANS, mend)
        name_it = f"or name one as CC under `env` of hosts.{facts.host.name}"
        mend = f"inside: apt-get install gcc libc6-dev (Debian, Ubuntu); {name_it}"
        return failure("no C compiler: neither gcc nor clang is on the PATH", MEANS, mend)
    problem = text(said.get("problem"))
    if "Python.h" in problem:
        package = f"python{'.'.join(str(each) for each in version[:2])}-dev"
        other = "make the venv of a Python that brings its headers (uv, conda)"
        mend = f"inside: apt-get install {package} (Debian, Ubuntu), or {other}"
        return failure(f"{command}: {problem}", MEANS, mend)
    if problem:
        mend = "inside: apt-get install libc6-dev (Debian, Ubuntu), and try it again"
        return failure(f"{command}: {problem}", MEANS, mend)
    return ok(f"{command} compiles what Triton starts its kernels with")
