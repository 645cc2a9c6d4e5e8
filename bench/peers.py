"""Other trainers of DFlash drafters beside ours on the same device: context tok/s and peak memory.

    python bench/peers.py [--shape 27b] [--context-tokens 24576] [--anchors 3072] ...    (docs/performance.md)

`speculators` (`pip install --no-deps speculators==0.9.0`) and SpecForge (a checkout in PYTHONPATH) take part
where they are there; who did not run is told. All get the same sizes, random states, float32 weights with
bfloat16 products on a GPU, and one optimizer: clipping to 1 and torch's fused AdamW. Each is built, timed and
dropped before the next, and compiles as if it were alone.
Prints a table of figures and ratios (ours over theirs) and, last, one line of JSON. Exit code 1: one failed,
and not for want of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PLACES = (".", "bench", "tests/trainer/oracles", "tests/kit")
sys.path[:0] = [str(REPOSITORY / place) for place in PLACES]

from trainer.machine import prepare_environment  # noqa: E402

prepare_environment()

import torch  # noqa: E402
from peers_kit import Absent, Peer, updated  # noqa: E402
from peers_specforge import specforge  # noqa: E402
from peers_speculators import speculators  # noqa: E402

from trainer.bench import timing  # noqa: E402
from trainer.bench.measure import Settings, make_step, problems  # noqa: E402
from trainer.bench.shapes import SHAPES, batch_of  # noqa: E402
from trainer.training.objective import draw  # noqa: E402


def ours(settings: Settings) -> Peer:
    step, device = make_step(settings), settings.where
    batch = batch_of(SHAPES[settings.shape], settings.rows, settings.row_tokens, device)
    uniform = draw((settings.rows, settings.row_tokens), 0, 0, 0).to(device)
    anchors = int(step.blocks(batch.rows, uniform).keep.sum())
    return Peer(updated(step.drafter, lambda: step.gradients(batch, [uniform])), anchors)


Make = Callable[[Settings], Peer]
PEERS: dict[str, Make] = {
    "ours": ours,
    "speculators": speculators,
    "speculators/bf16": partial(speculators, narrow=True),
    "specforge": specforge,
}


class Failed(str):
    """Why one gave no figures, where that is neither its absence nor the device's memory."""


def entrants(settings: Settings, who: list[str] | None = None) -> dict[str, tuple[Make, Settings]]:
    """Who is measured, each with all rows at once; and SpecForge by fewer, where that is wished.

    Args:
        who: only these.
    """
    whole = replace(settings, micro_rows=None)
    found = {name: (make, whole) for name, make in PEERS.items()}
    if settings.micro_rows:
        found[f"specforge/{settings.micro_rows}"] = (specforge, settings)
    unknown = [name for name in who or [] if name not in found]
    if unknown:
        sys.exit(f"error: --who: {', '.join(unknown)}: not among {', '.join(found)}")
    return {name: each for name, each in found.items() if who is None or name in who}


def measured(make: Make, settings: Settings) -> dict[str, Any] | str:
    """The figures of one, or why there are none."""
    device = settings.where
    gpu = device.type == "cuda"
    gc.collect()
    torch.compiler.reset()  # shapes that another one compiled would make this one's dynamic
    timing.reset_peak(device)
    stance = "default" if gpu else "force_eager"  # a CPU's toy sizes are not worth compiling
    try:
        peer = make(settings)
        with torch.compiler.set_stance(stance):
            seconds = timing.timed(peer.step, device, settings.repeats, warmup=3 if gpu else 1)
    except Absent as absent:
        return str(absent)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        traceback.print_exc()
        return Failed(f"{type(error).__name__}: {error}".splitlines()[0])
    return {
        "anchors": peer.anchors,
        "ms": 1e3 * seconds,
        "context_tok_s": settings.context_tokens / seconds,
        "peak_gib": timing.peak_gib(device),
    }


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ours over each other one that ran: tok/s (more is better), and peak memory (less is better)."""
    mine, made = found.get("ours", "left out"), {}
    for name, theirs in found.items():
        if name == "ours" or isinstance(theirs, str) or isinstance(mine, str):
            continue
        made[name] = {"context_tok_s": mine["context_tok_s"] / theirs["context_tok_s"]}
        if mine["peak_gib"] and theirs["peak_gib"]:
            made[name]["peak_gib"] = mine["peak_gib"] / theirs["peak_gib"]
    return made


def line(name: str, figures: dict[str, Any] | str) -> str:
    """Of the table."""
    if isinstance(figures, str):
        return f"{name:<16} DID NOT RUN: {figures}"
    peak = "-" if figures["peak_gib"] is None else f"{figures['peak_gib']:.1f}"
    rate = f"{figures['ms']:>10,.1f} {figures['context_tok_s']:>14,.0f}"
    return f"{name:<16} {figures['anchors']:>8,} {rate} {peak:>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--context-tokens", type=int, default=24_576)
    parser.add_argument("--row-tokens", type=int, default=4_096)
    parser.add_argument("--anchors", type=int, default=3_072)
    parser.add_argument("--anchors-per-pass", type=int, help="of a row, that ours has at once; left out: all")
    parser.add_argument("--micro-rows", type=int, help="specforge once more, with so many rows at once")
    parser.add_argument("--execution", choices=["eager", "compiled", "captured"], default="eager")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--who", help="names of the table, with commas; left out: all")
    given = vars(parser.parse_args())
    who = given.pop("who")
    settings = Settings(**given)
    settings = replace(settings, precision="bfloat16" if settings.where.type == "cuda" else "float32")
    if wrong := problems(settings):
        sys.exit("error: " + "; ".join(wrong))
    print(f"{'who':<16} {'anchors':>8} {'ms':>10} {'context tok/s':>14} {'peak GiB':>9}", flush=True)
    found: dict[str, Any] = {}
    for name, entrant in entrants(settings, who and who.split(",")).items():
        found[name] = measured(*entrant)
        print(line(name, found[name]), flush=True)  # whoever cuts this program short has what was measured
    compared = ratios(found)
    for name, each in compared.items():
        print(f"ours over {name}: " + ", ".join(f"{what} {value:.2f}" for what, value in each.items()))
    print(json.dumps({**given, "torch": torch.__version__, "found": found, "ours_over": compared}))
    if any(isinstance(each, Failed) for each in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
