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

    def within(self, columns: int) -> str:
        """Return the table as text of at most so many columns where possible.

        Cells that do not fit stand in further tables below, behind the first cell of their row.
        """
        num_cells = len(self.headers)
        fitting = (n for n in range(num_cells, 2, -1) if self._part(1, n).width() <= columns)
        last = next(fitting, min(2, num_cells))
        parts = [str(self._part(1, last))]
        if last < num_cells:
            parts.append(self._part(last, num_cells).within(columns))
        return "\n\n".join(parts)

    def width(self) -> int:
        """Return the columns of the longest line."""
        return max(len(line) for line in str(self).splitlines())

    def _part(self, start: int, end: int) -> "Table":
        """Return the table with the first cell of each row, and those from `start` to `end`."""
        headers = self.headers[:1] + self.headers[start:end]
        rows = tuple(row[:1] + row[start:end] for row in self.rows)
        return Table(headers=headers, rows=rows, marked=self.marked)
