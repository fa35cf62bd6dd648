"""What became of the rows of the data, in numbers and as one line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.base.units import plural
from headrace.data.broken import Broken
from headrace.data.chat import TODAY
from headrace.data.rows import Pair, Text
from headrace.data.sources import by_ending
from headrace.data.turns import Chat

NAMED = 10
"""Broken or over-long rows that a message names; the rest is counted."""


@dataclass
class Counts:
    """Counted in rows of the data, but `packed` and `kept` in rows that are made of them.

    `mapped`: conversations that came as ShareGPT; `apart`: turns in rows of their own, for the template rewrites them
    once others follow; `closed`: conversations that got an end token; `parted`: encoded in parts, for a token would
    have crossed a turn's border; `dated`: the template writes a date; `room`: tokens that fit into packed rows;
    `passed_over`: files of folders that are not read, by their ending;
    `example`: the first row with tokens that are only read, the others between >>> and <<<.
    """

    files: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    documents: int = 0
    pairs: int = 0
    conversations: int = 0
    mapped: int = 0
    apart: int = 0
    closed: int = 0
    parted: int = 0
    dated: bool = False
    packed: int = 0
    room: int = 0
    kept: int = 0
    cut: int = 0
    dropped: int = 0
    unlabelled: int = 0
    broken: int = 0
    tokens: int = 0
    labels: int = 0
    longest: int = 0
    example: str = ""
    named: list[str] = field(default_factory=list)

    def add(self, row: Text | Pair | Chat) -> None:
        """Count a row by its kind; a document with its last piece."""
        if isinstance(row, Text):
            self.documents += not row.more
        elif isinstance(row, Pair):
            self.pairs += 1
        else:
            self.conversations += 1
            self.mapped += row.mapped

    def add_broken(self, row: Broken) -> None:
        self.broken += 1
        if len(self.named) < NAMED:
            self.named.append(f"{row.where}: {row.reason}")

    def __str__(self) -> str:
        kinds: list[tuple[int, str, str]] = [
            (self.files, "file", ""), (self.documents, "document", ""), (self.pairs, "prompt/completion pair", ""),
            (self.conversations, "conversation", ""),
            (self.mapped, "of them in from/value form", "of them in from/value form"),
            (self.apart, "turn in a row of its own, because the chat template rewrites earlier turns",
             "turns in rows of their own, because the chat template rewrites earlier turns"),
            (self.closed, "conversation given an end token that the chat template does not write",
             "conversations given an end token that the chat template does not write"),
            (self.parted, "row encoded in parts, because a token would cross the border of a turn",
             "rows encoded in parts, because a token would cross the border of a turn"),
        ]  # fmt: skip
        parts = [plural(*kind) for kind in kinds if kind[0]]
        if self.passed_over:
            parts.append(f"passed over in folders, unless named: {by_ending(self.passed_over)}")
        parts.append(
            f"{plural(self.kept, 'row')} kept ({self.cut} of them cut), {self.dropped} dropped as too long, "
            f"{self.unlabelled} without a token to train on removed, {self.broken} broken skipped"
        )
        if self.dated:
            parts.append(f"the chat template's date is always {TODAY}, so that a run can go on another day")
        if self.room:
            parts.append(f"packed into {plural(self.packed, 'row')}, {100 * self.tokens / self.room:.1f} % full")
        elif self.packed:
            parts.append(f"{plural(self.packed, 'row')} of joined documents")
        return "; ".join(parts) + f"; {plural(self.tokens, 'token')}, {self.labels} of them trained"
