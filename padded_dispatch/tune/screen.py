"""Show a study on one screen of a terminal: the answer, the menu, and a block to paste.

A terminal shows the last lines of what is written. So what does not fit is left out, the least
important first, and stands in the report. A pipe gets everything.
"""

import textwrap
from pathlib import Path

from padded_dispatch.tune.hosts import ABOUT, exchange_table, sentence
from padded_dispatch.tune.menu import menu, notes, pool_table
from padded_dispatch.tune.settings import NO_LAYERS, blocks
from padded_dispatch.tune.study import Study
from padded_dispatch.tune.table import Table

SETTINGS = "settings.md"

# Parts in the order of their places on a screen; those in `_ALWAYS` are there in any case.
_ALWAYS = ("answer", "menu", "settings")
_BY_IMPORTANCE = ("evaluation", "promise", "hosts", "warm-up", "pools", "held-out", "caveats")
_BY_IMPORTANCE += ("notes", "layers")
# They follow the part before them without an empty line.
_ATTACHED = ("promise", "notes")


def summary(
    study: Study, folder: Path, *, columns: int | None = None, lines: int | None = None
) -> str:
    """Return the text for the terminal.

    Args:
        study: its content.
        folder: holds the files of the report.
        columns: no line is longer; None for no limit.
        lines: the text has no more, if the answer, the menu and a block to paste fit into them;
            None for no limit.
    """
    parts = _parts(study, folder, columns)
    shown = [name for name in parts if name in _ALWAYS or lines is None]
    for name in (name for name in _BY_IMPORTANCE if lines is not None and name in parts):
        more = [*shown, name]
        if _joined(parts, more).count("\n") + 1 <= (lines or 0):
            shown = more
    return _joined(parts, shown)


def _joined(parts: dict[str, str], shown: list[str]) -> str:
    """Return the shown parts in reading order."""
    text = ""
    for name in (name for name in parts if name in shown):
        gap = "\n" if name in _ATTACHED else "\n\n"
        text += (gap if text else "") + parts[name]
    return text


def _parts(study: Study, folder: Path, columns: int | None) -> dict[str, str]:
    """Return all parts by name, in reading order."""

    def prose(*texts: str) -> str:
        return "\n".join(_filled(text, columns) for text in texts)

    def table(made: Table) -> str:
        return made.within(columns) if columns else str(made)

    answer, more, promise = study.training.sentence().partition(". " if columns else "\n")
    parts = {"answer": prose(answer + more.strip())}
    if promise:
        parts["promise"] = prose(promise)
    if study.warm_up is not None:
        parts["warm-up"] = prose(study.warm_up.sentence())
    if len(study.pools) > 1:
        parts["pools"] = table(pool_table(study))
    parts["menu"] = table(menu(study))
    parts["notes"] = prose(*(f"  {note}" for note in notes(study)))
    evaluation = study.evaluation.overall
    promised = "" if evaluation.promised else ", without a promise"
    parts["evaluation"] = prose(
        "In evaluation: eager passes drop nothing. Where a CUDA graph captures evaluation, "
        f"--padded-eval-factor {evaluation.factor:g} is for {study.evaluation.target}{promised}."
    )
    if study.held_out is not None:
        parts["held-out"] = prose(study.held_out_sentence())
    if caveats := study.training.overall.caveats[1:]:
        parts["caveats"] = prose(*(f"Also: {caveat}." for caveat in caveats))
    if study.hosts:
        made = table(exchange_table(study.hosts, study.num_ranks))
        parts["hosts"] = f"{prose(ABOUT)}\n{made}\n{prose(sentence(study.hosts))}"
    if layers := _layers(study):
        parts["layers"] = prose(layers)
    parts["settings"] = _settings(study, folder, columns)
    return parts


def _layers(study: Study) -> str:
    factors = [advice.factor for advice in study.training.layers.values()]
    if len(factors) < 2:
        return ""
    words = f"Each layer by itself: {min(factors):g} to {max(factors):g}; the report lists them."
    return words if study.layers_of_model else f"{words} {NO_LAYERS}"


def _settings(study: Study, folder: Path, columns: int | None) -> str:
    """Return the block for Megatron-LM, and where the others are."""
    first, *others = blocks(study, per_layer=False)
    names = [block.target for block in others]
    words = f"{first.target}, {first.about} ({', '.join(names)}: {folder / SETTINGS}):"
    return f"{_filled(words, columns)}\n{first.text}"


def _filled(text: str, columns: int | None) -> str:
    return textwrap.fill(text, columns, break_on_hyphens=False) if columns else text
