"""What a run's Python has: interpreter, packages, torch, CUDA, and ways between GPUs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok, warning
from dflashctl.render.text import duration, plural
from dflashctl.runs.facts import listed, mapping, number, text, whole

PYTHON_LEAST = (3, 11)
LEAST = {"torch": (2, 11), "transformers": (5, 17), "safetensors": (0, 5)}
"""As pyproject.toml has them for the extra `trainer`."""
FOR_GPUS = {
    "triton": "torch.compile has no back end for GPUs without it",
    "flash-linear-attention": "hybrid targets (Qwen3.5 and 3.6) run at about half their speed without it",
    "causal-conv1d": "hybrid targets (Qwen3.5 and 3.6) run at about half their speed without it",
}
CUDA_MEANINGS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU can be opened: see device nodes",
    "CUDA_ERROR_UNKNOWN": "mostly nvidia-uvm: missing, stale or not allowed (see above)",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the NVSwitch fabric is not up: see NVLink",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libraries differ: see driver",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the compatibility libraries do not fit this card",
}
COMPUTE_MODES = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def python(facts: Facts) -> Finding:
    wanted = facts.host.python
    seen = facts.interpreter
    gone, make = _no_python(wanted, text(seen.get("broken")))
    if facts.inside is None:
        if seen.get("exists") is False:
            return failure(gone, "no run can start", make)
        if facts.inside_asked:
            mend = f"try it inside: {wanted} -c 1"
            return failure(f"{wanted} does not answer: {facts.inside_problem}", "no run can start", mend)
        there = f"{wanted} is there; " if seen.get("exists") is True else ""
        return not_known(f"{there}{facts.inside_problem}")
    used = text(facts.inside.get("executable"))
    version = tuple(whole(each) or 0 for each in listed(facts.inside.get("version")))
    shown = ".".join(str(each) for each in version)
    if seen.get("exists") is False:
        return failure(f"{gone} (looked with {used} {shown} instead)", "no run can start", make)
    if version[:2] < PYTHON_LEAST:
        least = ".".join(str(each) for each in PYTHON_LEAST)
        mend = f"make a venv of a newer Python and name it as `python:` of hosts.{facts.host.name}"
        return failure(f"{wanted} is Python {shown}", f"the trainer needs {least} or newer", mend)
    venv = facts.inside.get("prefix") != facts.inside.get("base_prefix")
    return ok(f"{wanted}: Python {shown}, {'in a virtual environment' if venv else 'the system’s own'}")


def _no_python(wanted: str, broken: str) -> tuple[str, str]:
    """(what was found in place of the interpreter, how to mend it)."""
    other = "or set `python:` in hosts.yaml"
    venv = wanted.rpartition("/bin/")[0] or wanted
    if not broken:
        return f"there is no {wanted}", f"make it: python3 -m venv {venv}, {other}"
    if "leads to" in broken:
        anew = f"python3 -m venv --clear {venv}, and install its packages again"
        return f"{wanted} {broken}", f"the Python that it was made of is gone: {anew}; {other}"
    return f"{wanted} {broken}", f"look at it: ls -l {wanted}; {other}"


def packages(facts: Facts) -> Finding:
    versions = mapping(facts.said("packages").get("versions"))
    if not versions:
        return _silent(facts, "the installed packages")
    shown = ", ".join(f"{name} {text(each)}" for name, each in versions.items() if text(each))
    install = f"{shlex.quote(facts.host.python)} -m pip install"
    gone = [name for name in LEAST if not text(versions.get(name))]
    if gone:
        return failure(
            f"not installed: {', '.join(gone)}", "the trainer cannot start", f"{install} {' '.join(gone)}"
        )
    old = [name for name, least in LEAST.items() if version_of(text(versions[name])) < least]
    if old:
        least = {name: ".".join(map(str, LEAST[name])) for name in old}
        wants = ", ".join(f"{name} {each}" for name, each in least.items())
        mend = f"{install} {' '.join(shlex.quote(f'{name}>={each}') for name, each in least.items())}"
        return failure(f"too old: {shown}", f"the trainer needs at least {wants}", mend)
    if not for_gpus(facts):
        return ok(f"{shown} (a build for CPUs)")
    slow = [name for name in FOR_GPUS if not text(versions.get(name))]
    if slow:
        means = "; ".join(dict.fromkeys(f"{FOR_GPUS[name]}" for name in slow))
        return warning(f"{shown}; not installed: {', '.join(slow)}", means, f"{install} {' '.join(slow)}")
    return ok(shown)


def version_of(words: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", words)
    return tuple(int(each) for each in match[0].split(".")) if match else ()


def for_gpus(facts: Facts) -> bool:
    """Whether the installed torch is a build for GPUs, by its version where it cannot be imported; unknown
    counts as yes."""
    said = facts.said("torch")
    if said and not said.get("problem"):
        return bool(said.get("cuda"))
    return not text(mapping(facts.said("packages").get("versions")).get("torch")).endswith("+cpu")


def torch(facts: Facts) -> Finding:
    said = facts.said("torch")
    if not said:
        return _silent(facts, "torch")
    if said.get("problem"):
        mend = "mend or reinstall torch in that venv"
        return failure(f"import torch: {text(said.get('problem'))}", "no training can start", mend)
    version, build = text(said.get("version")), text(said.get("cuda"))
    installed = text(mapping(facts.said("packages").get("versions")).get("torch"))
    if installed and version_of(installed) != version_of(version):
        return failure(
            f"torch {version} is imported from {text(said.get('at')) or '?'}, and {installed} is installed",
            "two of them are there: other packages were built for the one, and runs use the other",
            "look for PYTHONPATH in `env`; pip uninstall torch until none is left, and install it again",
        )
    took = f"imported in {duration(number(said.get('import_s')))}"
    expected = 0 if facts.simulated or facts.host.gpus.expect == 0 else len(facts.query.gpus)
    if not build:
        found = f"torch {version} is a build for CPUs, {took}"
        if not expected:
            return ok(f"{found}{'; the GPUs here are simulated' if facts.simulated else ''}")
        mend = "install the CUDA build in that venv, from the index of wheels that pytorch.org names"
        return failure(found, f"it cannot use the {plural(expected, 'GPU')} of this box", mend)
    seen = whole(said.get("count")) or 0
    if not seen and expected:
        error = text(facts.said("cuda").get("error"))
        why = f"{error}: {CUDA_MEANINGS.get(error, 'see the lines above')}" if error else ""
        why = why or "; ".join(text(each) for each in listed(said.get("warnings"))) or "it does not say why"
        return failure(
            f"torch {version} (CUDA {build}) sees no GPU", why, "see driver and device nodes above"
        )
    if seen < expected:
        means = "runs would start with fewer GPUs than the host has"
        return failure(f"torch {version} sees {seen} of {expected} GPUs", means, "see device nodes above")
    strange = _unknown_architectures(facts)
    if strange:
        means = "`no kernel image is available for execution on the device`"
        return failure(f"torch {version} has no code for {strange}", means, "install a newer build of torch")
    return ok(f"torch {version} (CUDA {build}) sees {plural(seen, 'GPU')}, {took}")


def _unknown_architectures(facts: Facts) -> str:
    """Cards for which this torch has neither code nor PTX of an older generation."""
    built = [text(each) for each in listed(facts.said("torch").get("architectures"))]
    codes = {int(match[1]) for each in built if (match := re.fullmatch(r"sm_(\d+)[a-z]?", each))}
    ptx = {int(match[1]) for each in built if (match := re.fullmatch(r"compute_(\d+)[a-z]?", each))}
    missing = set()
    for device in _devices(facts):
        major, minor = (whole(each) for each in (*listed(device.get("capability")), None, None)[:2])
        if major is None or minor is None or not codes:
            continue
        card = major * 10 + minor
        same = any(code // 10 == major and code <= card for code in codes)
        if not same and not any(code <= card for code in ptx):
            missing.add(f"sm_{card}")
    return ", ".join(sorted(missing))


def _devices(facts: Facts) -> list[Mapping[str, Any]]:
    return [mapping(each) for each in listed(facts.said("cuda").get("devices"))]


def peers(facts: Facts) -> Finding:
    """Whether each GPU can reach the memory of each other one; asked of the driver, without a context."""
    said = facts.said("cuda")
    trouble = _no_cuda(facts)
    if trouble is not None:
        return trouble
    rows = [listed(row) for row in listed(said.get("peers"))]
    if len(rows) < 2:
        return ok("one GPU alone")
    cut = [
        f"{i}-{j}" for i, row in enumerate(rows) for j, each in enumerate(row) if i < j and each is not True
    ]
    pairs = len(rows) * (len(rows) - 1) // 2
    if cut:
        return warning(
            f"not possible between {', '.join(cut[:12])} ({len(cut)} of {plural(pairs, 'pair')})",
            "hidden states between those GPUs go through main memory, many times slower",
            "on the host: nvidia-smi topo -p2p r says why; mostly IOMMU or ACS settings of the BIOS",
        )
    return ok(f"possible between all {plural(pairs, 'pair')}; dflashctl probe p2p measures it")


def ipc(facts: Facts) -> Finding:
    """Whether anything stands in the way of memory shared between processes; the proof is a probe."""
    for name in ALLOCATOR:
        if "expandable_segments:true" in facts.host.env.get(name, "").lower().replace(" ", ""):
            return failure(
                f"env.{name} of hosts.{facts.host.name} asks for expandable segments",
                "memory of such segments cannot be shared between processes in a container",
                f"take expandable_segments out of {name}",
            )
    trouble = _no_cuda(facts)
    if trouble is not None:
        return trouble
    for index, device in enumerate(_devices(facts)):
        mode = whole(device.get("compute_mode"))
        if mode:
            means = "a second process cannot open this GPU, so nothing can be shared with it"
            found = f"GPU {index} is in compute mode {COMPUTE_MODES.get(mode, mode)}"
            return failure(found, means, f"on the host: nvidia-smi -c 0 -i {index}")
        if device.get("unified") == 0 or device.get("ipc_events") == 0:
            means = "the ring of hidden states between processes needs it"
            return failure(f"GPU {index} cannot share memory or events", means, "use transport: shm")
    sliced = [gpu.name for gpu in facts.query.gpus if gpu.get("MIG Mode", "Current") == "Enabled"]
    if sliced:
        means = "slices of a GPU share no memory between processes"
        return failure(f"MIG is on: {', '.join(sliced)}", means, "on the host: nvidia-smi -mig 0")
    return ok("nothing stands in its way; dflashctl probe ipc proves it")


def _no_cuda(facts: Facts) -> Finding | None:
    """Why CUDA cannot be asked, as a finding; None when it answers."""
    said = facts.said("cuda")
    if facts.simulated:
        return not_known("simulated GPUs have no CUDA")
    if not said:
        return _silent(facts, "CUDA")
    if said.get("problem"):
        return not_known(f"{text(said.get('problem'))}: see driver above")
    error = text(said.get("error"))
    if error:
        means = CUDA_MEANINGS.get(error, "no program can use a GPU there")
        return failure(f"cuInit: {error}", means, "see driver, device nodes and nvidia-uvm above")
    return None


def _silent(facts: Facts, what: str) -> Finding:
    """The child did not come that far."""
    child = facts.torch
    if not child:
        return not_known("no Python of runs could be asked")
    if child.get("problem") == "timeout":
        return failure(
            f"{what} did not answer within {duration(number(child.get('took_s')))}",
            "importing it hangs: a driver that does not answer, or a file system that does not",
            "inside: py-spy dump on `python -c 'import torch'`; look at the disk under the venv",
        )
    last = (text(child.get("stderr")).splitlines() or [""])[-1]
    why = f"{text(child.get('problem')) or 'it said nothing'}{': ' + last if last else ''}"
    return failure(
        f"{what} could not be asked: {why}", "no training can start", "try it: python -c 'import torch'"
    )
