"""`python -m dflash_inspect.torch_facts WHAT...` (inductor, env): what the torch beside it is set to, and
why.

Writes lines of JSON on the descriptor that DFLASH_ANSWER_FD names: {"progress": text}, and at the end
{"answer": {WHAT: facts}}. Stdlib and torch alone; no GPU is opened: a look must not leave a context behind.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from .env_reads import Source
from .variables import package_folders, set_variables, variables_read

MODULES = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config")
REPR_LIMIT = 2000


def main(wanted: list[str]) -> None:
    say = _channel()
    answer: dict[str, Any] = {}
    if "inductor" in wanted:
        answer["inductor"] = inductor(say)
    if "env" in wanted:
        say({"progress": "looking at torch's libraries"})
        answer["env"] = built_with()
    say({"answer": answer})


def _channel() -> Callable[[dict[str, Any]], None]:
    out = os.fdopen(int(os.environ.pop("DFLASH_ANSWER_FD")), "w", encoding="utf-8")

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    return say


def inductor(say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """{"torch": version, "options": [option], "modes": {mode: {option: value}}, "variables": {name:
    {"options", "files"}}, "set": [variable], "problems": [text]}."""
    given = dict(os.environ)  # torch sets some itself when it is imported
    say({"progress": "reading torch's source for environment variables"})
    reads = variables_read(package_folders())
    say({"progress": "importing torch"})
    problems: list[str] = []
    options: list[dict[str, Any]] = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
            continue
        found, problem = module_options(module, set(reads), given)
        options += found
        problems += [problem] if problem else []
    by_name = {f"{option['module']}.{option['name']}": option for option in options}
    for option in options:
        if option["alias"] in by_name:
            option["default"] = by_name[option["alias"]]["default"]
        for name in option["variables"]:
            entry = reads.setdefault(name, {"options": [], "files": []})
            entry["options"].append(f"{option['module']}.{option['name']}")
    return {
        "torch": version("torch"),
        "options": options,
        "modes": modes(problems),
        "variables": reads,
        "set": set_variables(given, reads),
        "problems": problems,
    }


def module_options(
    module: ModuleType, variables: set[str], given: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Every option of a configuration module and of the classes in it, and what hindered a true answer.

    An option is {"module", "name", "value", "default", "origin", "variables", "alias"}: `origin` is default |
    environment | set | alias, `variables` are all those that its value can come from, and `default` is what
    the module's own source gives when none of `variables` is set. Values that JSON has no type for are shown
    as text.
    """
    file = str(module.__file__)
    sources = Source(Path(file).read_text(encoding="utf-8")).options()
    touched = {name: _overridden(module, name) for name in names_of(module)}  # before anything is read
    problem, clean = "", None
    try:
        clean = clean_copy(module, variables | {name for names in sources.values() for name in names})
    except Exception as error:
        problem = f"{module.__name__}: its defaults cannot be computed again: {type(error).__name__}: {error}"
    options = []
    for name in touched:
        value = read(module, name)
        entry, names = entry_of(module, name), sources.get(name, [])
        default = read(clean, name) if clean is not None else getattr(entry, "default", value)
        alias = getattr(entry, "alias", None)
        if alias is not None:
            origin = "alias"
        elif touched[name] and value != default:
            origin = "set"
        elif any(each in given for each in names):
            origin = "environment"
        else:
            origin = "default" if value == default else "set"
        options.append(
            {
                "module": module.__name__,
                "name": name,
                "value": plain(value),
                "default": plain(default),
                "origin": origin,
                "variables": names,
                "alias": alias,
            }
        )
    return options, problem


def names_of(module: Any, prefix: str = "") -> list[str]:
    """`triton.cudagraphs` and the like: from the module's own table, else from its plain attributes."""
    table = getattr(module, "_config", None)
    if isinstance(table, dict):
        return sorted(table)
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        if isinstance(value, type):
            home = module.__name__ if isinstance(module, ModuleType) else module.__module__
            found += names_of(value, f"{prefix}{name}.") if value.__module__ == home else []
        elif not callable(value):
            found.append(prefix + name)
    return found


def entry_of(module: Any, name: str) -> Any:
    table = getattr(module, "_config", None)
    return table.get(name) if isinstance(table, dict) else None


def _overridden(module: Any, name: str) -> bool:
    """Has the program set it? torch keeps that apart: plainly, or (newer) in a variable of the context."""
    override = getattr(entry_of(module, name), "user_override", None)
    if override is None:
        return False
    if hasattr(override, "get") and hasattr(override, "reset"):
        override = override.get()
    return type(override) is not object  # the mark for "never set"


def read(module: Any, name: str) -> Any:
    """The value that the program would see. Names of tables are flat, others are followed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if isinstance(getattr(module, "_config", None), dict):
                return getattr(module, name)
            for part in name.split("."):
                module = getattr(module, part)
            return module
        except Exception as error:
            return f"<{type(error).__name__}: {error}>"


def clean_copy(module: ModuleType, variables: set[str]) -> ModuleType:
    """The module's source once more, in an environment without `variables`."""
    name = f"{module.__package__}.dflash_clean_{module.__name__.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    if spec is None or spec.loader is None:
        raise ImportError("no source")
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    try:
        with without(variables):
            spec.loader.exec_module(copy)
    finally:
        del sys.modules[name]
    return copy


@contextlib.contextmanager
def without(variables: set[str]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def plain(value: Any) -> Any:
    """As JSON where it has the type, else as text, the same each time for the same value."""
    if isinstance(value, (set, frozenset)):
        value = "{" + ", ".join(sorted(map(repr, value))) + "}"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ""
    return json.loads(text) if text and len(text) <= REPR_LIMIT else str(value)[:REPR_LIMIT]


def modes(problems: list[str]) -> dict[str, dict[str, Any]]:
    """`torch._inductor.list_mode_options()`."""
    try:
        from torch._inductor import list_mode_options

        listed = list_mode_options()
    except Exception as error:
        problems.append(f"list_mode_options: {type(error).__name__}: {error}")
        return {}
    return {mode: {name: plain(value) for name, value in options.items()} for mode, options in listed.items()}


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def built_with() -> dict[str, Any]:
    """What torch was built with and finds; each that cannot be told is null."""
    import torch

    def attempt(get: Callable[[], Any]) -> Any:
        try:
            return get()
        except Exception:
            return None

    nccl = attempt(lambda: torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None)
    driver = attempt(lambda: torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    return {
        "torch": torch.__version__,
        "git": attempt(lambda: torch.version.git_version),
        "cuda": torch.version.cuda,
        "cudnn": attempt(lambda: torch.backends.cudnn.version()),
        "nccl": ".".join(str(part) for part in nccl) if isinstance(nccl, tuple) else nccl,
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}" if driver else None,
        "gpus": attempt(torch.cuda.device_count),
        "arch_list": attempt(torch.cuda.get_arch_list),
        "compiler": attempt(lambda: os.environ.get("CXX") or _which(("g++", "c++", "clang++"))),
    }


def _which(names: tuple[str, ...]) -> str | None:
    import shutil

    return next((path for path in map(shutil.which, names) if path), None)


if __name__ == "__main__":
    main(sys.argv[1:])
