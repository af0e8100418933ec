"""The text for the terminal, and the page as a browser sees it: its elements and its numbers."""

import dataclasses
import re
from html import unescape
from pathlib import Path

import pytest

from padded_dispatch.tune import plots
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.recommend import Study, percent, recommend, study
from padded_dispatch.tune.replay import replay
from padded_dispatch.tune.report import (
    Table,
    blocks,
    factor_table,
    html,
    layer_table,
    pool_table,
    sentences,
    summary,
)
from tests.support.traces import synthetic_trace
from tests.tune.test_replay import demand


def studied(**given):
    trace = synthetic_trace("lognormal", num_layers=3, seed=1)
    return study(demand_of(trace), name="zipf <b>", **given)


@pytest.fixture(scope="module")
def found():
    """Cells, with the store beside them."""
    store = studied()
    assert store.pool == "store"
    return dataclasses.replace(store, chosen=store.answers[0])


def every_factor(found, *, brief=False) -> Table:
    return factor_table(found, range(len(found.chosen.replay.configs)), brief=brief)


def cells(table: Table, number: int) -> dict[str, str]:
    return dict(zip(table.headers, table.rows[number], strict=True))


def test_cells_of_the_tables(found):
    table, replay, advice = every_factor(found), found.chosen.replay, found.chosen.overall
    shown = {
        "factor": f"{advice.factor:g}",
        "slots": f"{advice.room:,}",
        "dropped": percent(advice.dropped),
        "worst step": percent(advice.worst),
        "steps affected": percent(replay.retried[table.marked]),
        "worst layer": percent(max(replay.layer_shares[table.marked])),
        "balanced": percent(replay.balanced[table.marked]),
        "GiB": f"{replay.kept_bytes[table.marked] / 2**30:.3g}",
    }
    assert cells(table, table.marked) == shown
    brief = every_factor(found, brief=True)
    assert brief.headers == ("factor", "slots", "dropped", "worst step", "GiB")
    table = layer_table(found)
    for number, (layer, advice) in enumerate(found.chosen.layers.items()):
        assert table.rows[number] == (
            str(layer),
            f"{found.chosen.replay.needed_alone[number]:.3g}",
            percent(advice.dropped),
            percent(advice.worst),
            f"{advice.factor:g}",
            f"{advice.room:,}",
        )


def max_of_first(replay) -> float:
    return replay.factors[replay.room == replay.room[0]].max()


def test_cells_of_pools(found):
    store = studied()
    assert (pool_table(found).marked, pool_table(store).marked) == (0, 1)
    for row, answer in zip(pool_table(found).rows, found.answers, strict=True):
        pool, factor, dropped, recomputed, retried, needed = row
        assert (pool, factor) == (answer.replay.pool, f"{answer.overall.factor:g}")
        share = percent(answer.overall.dropped)
        assert (dropped, recomputed) == ((share, "-") if pool == "cells" else ("0 %", share))
        assert retried == percent(answer.replay.retried[answer.index])
        index = answer.replay.factors.tolist().index(float(needed))
        lacking = answer.replay.dropped.sum((1, 2))[: index + 1]
        assert lacking[:-1].all() and lacking[-1] == 0
    # A layer by itself has five shares, which is all that two ranks can ask for.
    alone = studied(pools=("store",), store_layers=1)
    (row,) = pool_table(alone).rows
    assert row[1] == row[-1] == f"{alone.chosen.replay.factors[-1]:g}"  # All have one store.
    table = every_factor(store)
    replay, shown = store.chosen.replay, [cells(table, i) for i in range(len(table.rows))]
    # A row for each room, of which small factors have the same.
    assert [row["rows"] for row in shown] == [f"{room:,}" for room in sorted({*replay.room})]
    least, most = replay.factors[0], max_of_first(replay)
    assert shown[0]["factor"] == (f"{least:g} to {most:g}" if most > least else f"{least:g}")
    share = replay.dropped_share[-2]
    assert shown[-2]["recomputed"] == percent(share)
    assert shown[-2]["longer step"] == percent(0.15 * share)
    assert not {"slots", "balanced", "dropped"} & {*table.headers}
    assert layer_table(store).headers[-1] == "worst step" and len(layer_table(store).rows) == 3


def test_a_row_has_the_bytes_of_all_its_factors():
    """Eight ranks keep tokens from the factor 2.35 on, since 7 is no more than 1.5 * 2 * 2.35."""
    trace = synthetic_trace("lognormal", num_ranks=8, num_steps=3)
    replayed = replay(demand_of(trace), [0.5, 2.3, 2.35, 2.5], pool="store")
    assert {*replayed.room} == {5 * 2 * 64}
    few, same, many, more = replayed.kept_bytes
    assert few == same < many == more
    chosen = recommend(replayed)
    table = every_factor(Study(name="x", answers=(chosen,), chosen=chosen))
    rows = [cells(table, number) for number in range(len(table.rows))]
    assert [row["factor"] for row in rows] == ["0.5 to 2.3", "2.35 to 2.5"]
    assert [row["GiB"] for row in rows] == [f"{kept / 2**30:.3g}" for kept in (few, many)]
    # The advice is the last with the same bytes.
    assert (chosen.overall.factor, chosen.halves, table.marked) == (2.3, (2.3, 2.3), 0)


def test_rows_of_a_layer_that_a_store_drops_are_not_called_recomputed():
    """Of eight ranks' 128 rows, all for one of them, 80 have room."""
    asked = demand([[[[16, *[0] * 7]] * 8]], num_tokens=16, top_k=1)
    chosen = recommend(replay(asked, [1.25], pool="store"))
    assert chosen.shares == (0.375, 0)
    table = layer_table(Study(name="x", answers=(chosen,), chosen=chosen))
    assert table.headers == ("layer", "alone needs", "recomputed or dropped", "worst step")
    assert table.rows == (("1", "8", "37.5 %", "37.5 %"),)


def test_one_screen(found):
    text = summary(found, Path("tune.html"))
    lines = text.splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 80
    assert " ".join(text.split()).startswith(found.chosen.sentence())
    factors = [advice.factor for advice in found.chosen.layers.values()]
    assert f"Each layer by itself: {min(factors):g} to {max(factors):g}." in text
    assert str(pool_table(found)) in text
    assert "settings for Python: tune.html)" in " ".join(text.split())
    assert text.endswith(next(iter(blocks(found).values())))
    # The smallest factors for some shares, and the recommended one.
    rows = text.split("GiB")[1].split("\n\n")[0].splitlines()[1:]
    shown = [float(row.removeprefix(">").split()[0]) for row in rows]
    replay = found.chosen.replay
    for share in (0.1, 0.05, 0.01, 0.001, 0.0):
        assert replay.factors[replay.dropped_share <= share][0] in shown
    assert found.chosen.overall.factor in shown and len(shown) <= 7


def test_a_warning_is_in_the_text_and_on_the_page():
    drift = synthetic_trace("drift", num_layers=3, strength=2.0)
    young = study(demand_of(drift), name="x", pools=("cells",))
    (warning,) = young.chosen.warnings()
    assert warning in " ".join(summary(young, Path("tune.html")).split())
    assert warning in sentences(young) and warning in unescape(html(young, {}))
    text = summary(studied(pools=("store",)), Path("x"))
    assert "steps affected" not in text and "Each layer by itself" not in text
    assert "layer-factors" not in html(studied(), {})


def test_the_page_shows_the_recommendation_its_tables_and_its_settings(found):
    drawn = {name: plots.svg(figure) for name, figure in plots.figures(found).items()}
    page = html(found, drawn)
    assert page.count("<h1>Capacity factor for zipf &lt;b&gt;</h1>") == 1
    assert f'<div class="answer"><b>{found.chosen.overall.factor:g}</b>' in page
    paragraphs = re.findall(r"<p>(.*)</p>", page)
    assert [unescape(words) for words in paragraphs[: len(sentences(found))]] == sentences(found)
    tables = [
        [[unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)] for row in rows]
        for rows in (re.findall("<tr.*?</tr>", part)[1:] for part in page.split("<table>")[1:])
    ]
    given = pool_table(found), every_factor(found), layer_table(found)
    assert tables == [[list(row) for row in table.rows] for table in given]
    assert page.count('<tr class="marked">') == 2
    rows_of = f"{found.chosen.replay.asked.sum():,} rows of 40 micro-batches"
    assert rows_of in " ".join(page.split())
    settings = [unescape(block) for block in re.findall("<pre>(.*?)</pre>", page, re.DOTALL)]
    of_all, of_layers = blocks(found), blocks(found, per_layer=True)
    assert settings == [*of_all.values(), *of_layers.values()]
    assert page.count("<figure>") == 2 and "<figure>" not in html(found, {})
    # It needs nothing from elsewhere.
    assert not re.search("<(script|link|img|iframe|object|base)", page)
    assert not [at for at in re.findall(r'(?:src|href)="([^"]*)"', page) if at[0] != "#"]
