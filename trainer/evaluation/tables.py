"""An evaluation as people read it, and as a JSON document."""

from __future__ import annotations

from typing import Any

from trainer.evaluation.evaluate_checkpoint import Evaluation
from trainer.evaluation.figures import Run
from trainer.evaluation.measure import METHODS, SetResult
from trainer.evaluation.report import Report
from trainer.words import plural

AGREE = {"float32": 0.02, "bfloat16": 0.1}  # share of blocks that rounding may turn, in this precision
COLUMNS = [
    "set",
    "tokens",
    "acceptance\nlength",
    "of\nlookup",
    "tokens/s\nalone",
    "tokens/s\ndrafter",
    "speed-up",
    "of\nlookup",
    "not the\ntarget's",
]


def speed_up(run: Run, alone: Run) -> float:
    return run.tokens_per_s / alone.tokens_per_s if alone.tokens_per_s else 0.0


def evaluation_report(evaluation: Evaluation) -> Report:
    sets = [*evaluation.sets, evaluation.all] if len(evaluation.sets) > 1 else evaluation.sets
    rows = [_row(each, way, evaluation) for way in evaluation.all.runs for each in sets]
    total = evaluation.all
    runs = total.runs["greedy"]
    drafter, alone = runs["drafter"], runs["target"]
    headline = (
        f"acceptance length {drafter.acceptance_length:.2f}, {speed_up(drafter, alone):.2f} times the "
        f"target's speed (greedy, {evaluation.dtype}, {evaluation.device}, batch {evaluation.options.batch})"
    )
    slots = " ".join(f"{slot.rate:.2f}" for slot in drafter.slots(evaluation.block_size))
    histogram = ", ".join(f"{size}: {count}" for size, count in drafter.histogram.items())
    notes = [
        _lossless(evaluation),
        f"tokens per greedy verification pass, and how many passes: {histogram}",
        f"accepted at slots 1 to {evaluation.block_size - 1}, of those reached: {slots}",
        _as_trained(evaluation),
        f"{evaluation.repetition:.0%} of the 8-grams in the target's greedy text are repeats: they flatter "
        "drafters",
    ]
    if total.left_out:
        notes.append(
            f"left out: {plural(total.left_out, 'prompt')} longer than the target can read with "
            f"{evaluation.section.new_tokens:,} new tokens"
        )
    if evaluation.uncached:
        notes.append("this target is read anew at every pass: its rates and speed-ups mean nothing")
    return Report(headline, COLUMNS, rows, notes, not evaluation.faults)


def _row(result: SetResult, way: str, evaluation: Evaluation) -> list[str]:
    alone, drafter, lookup = (result.runs[way][method] for method in METHODS)
    name = "greedy" if way == "greedy" else f"T={evaluation.section.temperature:g}"
    found = len(result.found) if way == "greedy" else "-"
    return [
        f"{result.name}, {name}",
        f"{drafter.tokens:,}",
        f"{drafter.acceptance_length:.2f}",
        f"{lookup.acceptance_length:.2f}",
        f"{alone.tokens_per_s:,.0f}",
        f"{drafter.tokens_per_s:,.0f}",
        f"{speed_up(drafter, alone):.2f}",
        f"{speed_up(lookup, alone):.2f}",
        f"{found}",
    ]


def _lossless(evaluation: Evaluation) -> str:
    total = evaluation.all
    texts = [output for method in METHODS[1:] for output in total.runs["greedy"][method].outputs]
    tokens = sum(len(output.tokens) for output in texts)
    verdict = "NO" if evaluation.faults else "yes"
    near = len(total.found) - len(evaluation.faults)
    said = (
        f"lossless: {verdict} ({len(texts)} greedy texts, {tokens:,} tokens compared in {evaluation.dtype})"
    )
    if total.found:
        largest = max(each.divergence.gap for each in total.found)
        said += f"; {near} near-ties went the other way, {len(evaluation.faults)} tokens are wrong"
        said += f" (largest gap to the best logit {largest:.3g})"
    return said


def _as_trained(evaluation: Evaluation) -> str:
    """What the training pass promises, and whether it is what decoding gives."""
    total = evaluation.all
    real = total.runs["greedy"]["drafter"].acceptance_length
    said = (
        f"the training pass gets {total.as_trained:.2f} on the same blocks as decoding ({real:.2f}); "
        f"{total.disagreeing:,} of {len(total.right):,} blocks differ"
    )
    if honest(evaluation):
        return said
    return (
        f"{said}: training and decoding are not the same computation (mask, positions or taps); trust the "
        "figures of decoding"
    )


def honest(evaluation: Evaluation) -> bool:
    """Whether the training pass computes what decoding does, up to rounding."""
    total = evaluation.all
    return total.disagreeing <= AGREE[evaluation.dtype] * len(total.right)


def document(evaluation: Evaluation) -> dict[str, Any]:
    """For --json."""
    total = evaluation.all
    return {
        "schema": "trainer.eval/1",
        "drafter": evaluation.drafter,
        "target": evaluation.target,
        "device": evaluation.device,
        "dtype": evaluation.dtype,
        "block_size": evaluation.block_size,
        "batch": evaluation.options.batch,
        "new_tokens": evaluation.section.new_tokens,
        "temperature": evaluation.section.temperature if "sampled" in total.runs else None,
        "uncached": evaluation.uncached,
        "sets": [_set_document(each, evaluation) for each in evaluation.sets],
        "all": _set_document(total, evaluation),
        "lossless": not evaluation.faults,
        "divergences": [
            {
                "set": each.set,
                "prompt": each.prompt,
                "method": each.method,
                "position": each.divergence.position,
                "expected": each.divergence.expected,
                "said": each.divergence.said,
                "gap": each.divergence.gap,
                "near_tie": each.divergence.near_tie,
            }
            for each in total.found
        ],
        "training_agrees": honest(evaluation),
        "repeated_8grams": evaluation.repetition,
    }


def _set_document(result: SetResult, evaluation: Evaluation) -> dict[str, Any]:
    ways = {}
    for way, runs in result.runs.items():
        alone = runs["target"]
        ways[way] = {method: _run_document(run, alone, evaluation.block_size) for method, run in runs.items()}
    return {
        "name": result.name,
        "prompts": result.prompts,
        "left_out": result.left_out,
        **ways,
        "as_trained": {
            "acceptance_length": result.as_trained,
            "blocks": len(result.right),
            "disagreeing": result.disagreeing,
        },
    }


def _run_document(run: Run, alone: Run, block_size: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "tokens": run.tokens,
        "seconds": run.seconds,
        "tokens_per_s": run.tokens_per_s,
    }
    if run is alone:
        return told
    return {
        **told,
        "speed_up": speed_up(run, alone),
        "passes": run.passes,
        "acceptance_length": run.acceptance_length,
        "histogram": {str(size): count for size, count in run.histogram.items()},
        "slots": [
            {"slot": slot.slot, "reached": slot.reached, "accepted": slot.accepted}
            for slot in run.slots(block_size)
        ],
    }
