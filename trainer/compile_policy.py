"""How the drafter's forward is compiled, and in which threads: four named choices, and which of their
combinations are known to break.

    mode     eager | inductor | reduce-overhead (CUDA graph trees) | reduce-overhead-no-trees
    tls      none | local | stashed: what a thread sets up for the graph trees' per-thread state
    warm-up  lazy | main-thread | own-thread: who runs the first forward and backward
    start    parallel | sequential: whether a thread waits until the one before it is ready

What breaks is written in the table of known failures (known_failures.yaml, `policies`), for the torch
versions that its row names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainer import failures
from trainer.errors import ConfigError
from trainer.failures import KnownFailure
from trainer.sections import Policy

if TYPE_CHECKING:
    from torch import nn

Say = Callable[[str], None]


def hazards(policy: Policy, threads: int, torch_version: str, cuda: bool) -> list[KnownFailure]:
    """The known failures that a policy may run into. Pure.

    Args:
        threads: that compile or run the drafter.
        torch_version: such as 2.11.0+cu130.
        cuda: False: the CUDA graph modes compile without graphs there, so only compile races are left.
    """
    found = []
    for row in failures.table():
        for condition in row.policies:
            graphs = "mode" in condition and "inductor" not in _values(condition["mode"])
            if graphs and not cuda:
                continue
            if _meets(condition, policy, threads) and of_version(row.torch, torch_version):
                found.append(row)
                break
    return found


def _meets(condition: Mapping[str, Any], policy: Policy, threads: int) -> bool:
    if threads < int(condition.get("threads", 1)):
        return False
    return all(
        getattr(policy, key) in _values(wanted) for key, wanted in condition.items() if key != "threads"
    )


def _values(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def of_version(specifier: str, version: str) -> bool:
    """Whether a row's `torch` speaks of this version: "any", or comparisons such as ">=2.12,<2.13"."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if specifier.startswith("any"):
        return True
    return SpecifierSet(specifier).contains(Version(version).base_version, prereleases=True)


def refuse_unsound(policy: Policy, threads: int, torch_version: str, cuda: bool, say: Say) -> None:
    """Raises ConfigError for a policy that is known to break, unless the recipe forces it."""
    found = hazards(policy, threads, torch_version, cuda)
    if not found:
        return
    names = ", ".join(row.name for row in found)
    chosen = f"mode {policy.mode}, tls {policy.tls}, warmup {policy.warmup}, start {policy.start}"
    if policy.force:
        say(f"policy ({chosen}) is known to break with torch {torch_version}: {names}; forced")
        return
    raise ConfigError(
        f"{chosen} with {threads} drafter threads is known to break with torch {torch_version}: {names}. "
        f"{found[0].meaning}",
        where="train.policy",
        next=f"{found[0].do[0]}; policy.force: true runs it nevertheless",
    )


def needs_compiler(policy: Policy, cuda: bool) -> None:
    """Raises ConfigError where Inductor would compile and cannot: for a GPU without what kernels need, for a
    CPU without a C++ compiler.
    """
    if policy.mode == "eager":
        return
    if cuda:
        from trainer.model.gpu_kernels import why_none_here

        reason = why_none_here()
        if reason is not None:
            raise ConfigError(
                f"mode {policy.mode} cannot run: {reason}",
                where="train.policy.mode",
                next="use mode: eager",
            )
        return
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if any(each and shutil.which(each) for each in compilers):
        return
    raise ConfigError(
        f"mode {policy.mode} compiles for this CPU, and there is no C++ compiler",
        where="train.policy.mode",
        next="install g++ there, or use mode: eager",
    )


def setup_thread(policy: Policy) -> None:
    """What a thread does before its first compiled call: Inductor's options, which are each thread's own from
    torch 2.13 on, and the per-thread state of the CUDA graph trees.
    """
    set_options(policy)
    if policy.tls == "none":
        return
    import threading
    from collections import defaultdict

    import torch
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    local.tree_manager_containers = {}
    local.tree_manager_locks = defaultdict(threading.Lock)
    if policy.tls == "stashed":
        torch._C._stash_obj_in_tls("tree_manager_containers", local.tree_manager_containers)
        torch._C._stash_obj_in_tls("tree_manager_locks", local.tree_manager_locks)


def set_options(policy: Policy) -> None:
    """Inductor's options for the calling thread."""
    import torch._inductor.config as _inductor_config

    if policy.mode == "reduce-overhead-no-trees":
        _inductor_config.triton.cudagraph_trees = False


def compile_forward(module: nn.Module, policy: Policy, say: Say) -> None:
    """Let calls of `module` run compiled as the policy says, in place; the first call compiles."""
    if policy.mode == "eager":
        return
    import torch._inductor.config as _inductor_config

    graphs = policy.mode != "inductor"
    set_options(policy)
    if graphs:
        say(f"compiling forward (cudagraphs=True, cudagraph_trees={_inductor_config.triton.cudagraph_trees})")
        module.compile(dynamic=False, mode="reduce-overhead")
    else:
        say("compiling forward (cudagraphs=False)")
        module.compile(dynamic=False, options={"triton.cudagraphs": False})
