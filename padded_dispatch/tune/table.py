"""A table of text cells, for the terminal and for the page."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text cells; `marked` is the recommended row, if any."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    def __str__(self) -> str:
        lines = [self.headers, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        text = []
        for number, line in enumerate(lines, start=-1):
            cells = "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
            text.append(f"{'>' if number == self.marked else ' '} {cells}")
        return "\n".join(text)
