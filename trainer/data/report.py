"""What `prepare` says at its end."""

from __future__ import annotations

from trainer.data.prepare import named
from trainer.data.store import Store
from trainer.words import plural


def summary(store: Store) -> list[str]:
    """Lines for a person: what is in the store, what was left out, what is odd, how to train on it."""
    counts, template = store.counts, store.identity["template"]
    share = counts["supervised"] / max(1, counts["tokens"])
    lines = [
        f"{plural(counts['rows'], 'row')}: {plural(counts['documents'], 'document')}, "
        f"{plural(counts['tokens'], 'token')}, "
        f"{counts['supervised']:,} trained on ({share:.0%})"
    ]
    if template is not None:
        thinking = {True: "on", False: "off", None: "the template's default"}[template["thinking"]]
        day = f", on {template['date']}" if template["date"] else ""
        lines.append(f"chat template {template['template_sha256'][:8]}, thinking: {thinking}{day}")
    if counts["bad_rows"]:
        with (store.folder / "bad_rows.jsonl").open(encoding="utf-8") as file:
            first = named(file, 3)
        lines.append(
            f"{plural(counts['bad_rows'], 'bad row')} left out (bad_rows.jsonl in the store), such as"
        )
        lines += [f"  {each}" for each in first]
    if counts["other_mode"]:
        lines.append(
            f"note: {counts['other_mode']:,} of {counts['documents']:,} documents end in an answer as with "
            "thinking said otherwise; a drafter is worth most in the mode that it was trained in (--thinking)"
        )
    lines.append(
        f"train.data: {{source: store, store: {store.folder}, continuations: false, states: online}}"
    )
    lines.append(str(store.folder))
    return lines
