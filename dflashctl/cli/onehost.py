"""The frame of a verb that asks one host and shows what it says: for people, or as a JSON document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dflashctl.remote.engine import Engine

T = TypeVar("T")


def one_host(
    host: str | None,
    ask: Callable[[Engine], T],
    *,
    json: bool,
    schema: str,
    document: Callable[[T], Mapping[str, Any]],
    shown: Callable[[T], object],
) -> T:
    """Open the host, ask, close, and print the answer. Returns it. Raises what `ask` raises."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.json import emit
    from dflashctl.render.table import show

    with open_engine(load_hosts().host(host)) as engine:
        answer = ask(engine)
    if json:
        emit(schema, document(answer))
    else:
        show(shown(answer))
    return answer
