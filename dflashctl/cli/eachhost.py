"""`-H a,b`: the same act on several hosts, one after the other, and one verdict on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.errors import DflashError, SomeHostsFailed


@dataclass(frozen=True)
class Outcome:
    """What an act came to: the document for --json, and the error that ends the command after it."""

    document: dict[str, Any]
    error: DflashError | None = None


def each_host(hosts: Sequence[Host], act: Callable[[Host], Outcome], *, json: bool, schema: str) -> None:
    """Run `act`; with `json`, print its document (for several hosts as {"hosts": [...]}).

    One host: its error is the command's. Several: each error is said, the others go on, and SomeHostsFailed
    is raised at the end.
    """
    from dflashctl.render import hints
    from dflashctl.render.json import emit
    from dflashctl.render.table import say, warn

    if len(hosts) == 1:
        if hints.was_named():
            hints.about(hosts[0].name)  # `-H a,a` is one host, and only some verbs take several
        outcome = act(hosts[0])
        if json:
            emit(schema, outcome.document)
        if outcome.error is not None:
            raise outcome.error
        return
    documents, failed = [], []
    for host in hosts:
        hints.about(host.name)
        try:
            outcome = act(host)
        except DflashError as error:
            outcome = Outcome({"host": host.name}, error)
        document = outcome.document
        if outcome.error is not None:
            failed.append(host.name)
            document = {
                **document,
                "error": outcome.error.what,
                "exit_code": int(outcome.error.exit_code),
            }
            named = "" if outcome.error.where == host.name else f"{host.name}: "
            warn(hints.complete(f"{named}{outcome.error}"))
        documents.append(document)
        if not json:
            say()
    if json:
        emit(schema, {"hosts": documents})
    if failed:
        raise SomeHostsFailed(f"{len(failed)} of {len(hosts)} hosts failed: {', '.join(failed)}")
