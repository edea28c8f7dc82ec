"""Tables as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """Rows under a title.

    Attributes:
        title: what stands above.
        columns: names, one a column.
        rows: texts, one a column.
        note: a sentence that stands below.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""

    def text(self) -> str:
        """Return the table in columns of equal width."""
        lines = [list(map(str, row)) for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        parts = [self.title]
        for line in lines:
            cells = map(str.ljust, line, widths)
            parts.append("  ".join(cells).rstrip())
        return "\n".join([*parts, self.note] if self.note else parts)

    def markdown(self) -> str:
        """Return the table in Markdown, under its title in bold."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
        body[1] = f"|{'|'.join('---' for _ in self.columns)}|"
        parts = [f"**{self.title}**", "", *body]
        return "\n".join([*parts, "", self.note] if self.note else parts)


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
