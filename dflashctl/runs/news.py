"""What somebody is told of a run: its state, the evidence, what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from dflashctl.runs.vocabulary import State


@dataclass(frozen=True)
class News:
    host: str
    id: str
    tag: str
    state: State
    evidence: tuple[str, ...]
    next: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.tag} {self.state} on {self.host}"

    def document(self) -> dict[str, object]:
        """Schema dflashctl.news/1: what a hook gets on stdin, and a webhook as its body."""
        return {
            "schema": "dflashctl.news/1",
            "host": self.host,
            "id": self.id,
            "tag": self.tag,
            "state": self.state,
            "evidence": list(self.evidence),
            "next": list(self.next),
        }
