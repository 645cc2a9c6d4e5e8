"""Two runs side by side: code, configuration, environment, outcome; only what differs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dflashctl.history.listing import Shown
from dflashctl.render.text import commit, count, duration, size
from dflashctl.runs.facts import listed, mapping, number, text

OWN_VARIABLES = ("DFLASH_RUN_DIR", "DFLASH_RUN_ID", "DFLASH_TAG")
"""Differ between any two runs, and say nothing."""
UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Difference:
    name: str
    left: str
    right: str


@dataclass(frozen=True)
class Section:
    title: str
    differences: tuple[Difference, ...]
    same: int
    """How many things were compared and equal."""


def diff(left: Shown, right: Shown) -> tuple[Section, ...]:
    """The four sections, in reading order."""
    return tuple(
        compare(title, facts(left), facts(right))
        for title, facts in (
            ("code", code),
            ("configuration", configuration),
            ("environment", environment),
            ("outcome", outcome),
        )
    )


def compare(title: str, left: Mapping[str, str], right: Mapping[str, str]) -> Section:
    """Names that only one side has are shown as `-` on the other."""
    names = [*left, *(name for name in right if name not in left)]
    pairs = [(name, left.get(name, "-"), right.get(name, "-")) for name in names]
    different = tuple(Difference(*each) for each in pairs if each[1] != each[2])
    return Section(title, different, len(pairs) - len(different))


def code(shown: Shown) -> dict[str, str]:
    record = _record(shown)
    git = mapping(record.get("git"))
    found = {
        "release": text(record.get("release"))[:12] or "none",
        "git": commit(git) or UNKNOWN,
    }
    files = shown.detail.get("files")
    if isinstance(files, Mapping):
        found |= {text(path): text(digest)[:12] for path, digest in sorted(files.items())}
    elif record.get("release"):
        found["files"] = "gone with their release"
    return found


def configuration(shown: Shown) -> dict[str, str]:
    record = _record(shown)
    gpus = [str(mapping(each).get("index")) for each in listed(record.get("gpus"))]
    found = {
        "recipe": text(record.get("recipe")),
        "variant": text(record.get("variant")) or "none",
        "GPUs": ",".join(gpus) or "none",
    }
    try:
        found |= flat(yaml.safe_load(text(shown.detail.get("recipe"))) or {})
    except yaml.YAMLError:
        found["recipe.yaml"] = "damaged"
    for name, value in sorted(mapping(record.get("env")).items()):
        if name not in OWN_VARIABLES:
            found[f"env {name}"] = _without_id(text(value), shown)
    return found


def environment(shown: Shown) -> dict[str, str]:
    made = mapping(shown.detail.get("environment"))
    record = _record(shown)
    if not made:
        return {"environment": UNKNOWN}
    cache = mapping(record.get("compile_cache"))
    found = {
        "host": text(record.get("host")),
        "python": text(made.get("python")),
        "driver": text(made.get("driver")) or "none",
        "kernel": text(made.get("kernel")),
        "cpus": str(made.get("cpus")),
        "memory": size(number(made.get("memory_bytes"))),
        "compile cache": text(cache.get("state")) or UNKNOWN,
    }
    return found | {text(name): text(value) for name, value in sorted(mapping(made.get("packages")).items())}


def outcome(shown: Shown) -> dict[str, str]:
    entry = shown.entry
    facts, ending = entry.facts, entry.facts.ending
    best = entry.best_acceptance_length
    return {
        "state": entry.verdict.state,
        "how": entry.verdict.evidence[0] if entry.verdict.evidence else "-",
        "took": duration(entry.took_s),
        "step": count(facts.step),
        "peak memory": size(ending.peak_rss_bytes) if ending and ending.peak_rss_bytes else UNKNOWN,
        "exceptions": count(facts.log.exceptions) if facts.log and facts.log.exists else UNKNOWN,
        "root cause": facts.root_cause or "none",
        "headline": facts.headline or "none",
        "acceptance length": "not measured" if best is None else f"{best:.3f}",
        "lossless": {True: "yes", False: "NO", None: "not measured"}[entry.lossless],
    }


def flat(value: Any, path: str = "") -> dict[str, str]:
    """A document as {`launch.gpus.count`: "2"}; lists of plain values on one line."""
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, each in value.items():
            found |= flat(each, f"{path}.{key}" if path else str(key))
        return found
    if isinstance(value, list) and any(isinstance(each, (Mapping, list)) for each in value):
        found = {}
        for number_, each in enumerate(value):
            found |= flat(each, f"{path}[{number_}]")
        return found
    return {path: ", ".join(map(str, value)) if isinstance(value, list) else str(value)}


def _record(shown: Shown) -> Mapping[str, Any]:
    return mapping(shown.detail.get("record"))


def _without_id(value: str, shown: Shown) -> str:
    """Paths into the run's folder differ between any two runs."""
    return value.replace(shown.entry.facts.id, "<run>")
