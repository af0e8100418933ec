"""The text for the terminal, and the page as a browser sees it: its elements and its numbers."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

from padded_dispatch.tune import plots
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.recommend import Target, percent, study
from padded_dispatch.tune.report import Table, factor_table, html, layer_table, pool_table, summary
from padded_dispatch.tune.settings import blocks
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace

SIZES = TraceSizes(num_steps=40, num_layers=3, num_ranks=2, num_tokens=64, num_experts=16, top_k=2)
LAYER = LayerSizes(hidden_size=64, ffn_size=48, num_layers=3)
VOID = {"meta"}


def studied(*, kind="lognormal", sizes=LAYER, name="zipf <b>", **given):
    trace = synthetic_trace(kind, SIZES, seed=1)
    return study(trace, Target(), name=name, sizes=sizes, **given)


@pytest.fixture(scope="module")
def found():
    return studied()


def cells(table: Table, number: int) -> dict[str, str]:
    return dict(zip(table.headers, table.rows[number], strict=True))


def test_cells_of_the_factors(found):
    table = factor_table(found, found.options, brief=False)
    assert table.marked is not None
    option = found.options[table.marked]
    assert option.factor == found.chosen.overall.factor
    shown = {
        "factor": f"{option.factor:g}",
        "slots": f"{option.capacity:,}",
        "dropped": percent(option.dropped),
        "99 % of steps": f"<= {percent(option.in_most_steps)}",
        "lost tokens": percent(option.lost),
        "steps with drops": percent(option.retried),
        "worst layer": percent(option.worst_layer),
        "fill": percent(option.fill),
        "wire MB": f"{option.cost.wire_bytes / 1e6:.1f}",
        "GiB": f"{option.cost.memory_bytes / 2**30:.3g}",
    }
    assert cells(table, table.marked) == shown
    brief = factor_table(found, found.options, brief=True)
    left = set(shown) - {"steps with drops", "worst layer", "fill"}
    assert cells(brief, table.marked) == {name: shown[name] for name in left}
    bare = dataclasses.replace(found, sizes=None)
    assert factor_table(bare, bare.options, brief=True).headers[-1] == "lost tokens"
    assert "give --hidden-size and --ffn-size" in Page(html(bare, {})).texts["factors"]
    alone = studied(pools=("expert",))
    table = factor_table(alone, alone.options, brief=False)
    assert cells(table, 4)["balanced"] == percent(alone.options[4].balanced)


def test_cells_of_pools_and_layers(found):
    table = pool_table(found)
    assert table.marked == 1
    for number, answer in enumerate(found.answers):
        shown = cells(table, number)
        assert (shown["pool"], shown["factor"]) == (
            answer.replay.pool,
            f"{answer.overall.factor:g}",
        )
        assert shown["dropped"] == percent(answer.overall.dropped)
        assert shown["steps with drops"] == percent(answer.retried)
        needed = answer.replay.needed_factor.max()
        assert needed <= float(shown["drops nothing at"]) < needed + 0.01
    table = layer_table(found)
    for number, (layer, advice) in enumerate(found.chosen.layers.items()):
        assert table.rows[number] == (
            str(layer),
            f"{advice.factor:g}",
            f"{advice.capacity:,}",
            f"{advice.halves[0]:g}, {advice.halves[1]:g}",
            percent(advice.dropped),
            percent(advice.worst),
        )


def test_one_screen(found):
    text = summary(found, Path("tune.html"))
    lines = text.splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 80
    assert " ".join(text.split()).startswith(found.chosen.sentence())
    first, second = found.chosen.overall.halves
    assert f"The first half of the steps alone gives {first:g}, the second {second:g}." in text
    factors = [advice.factor for advice in found.chosen.layers.values()]
    assert f"Each layer by itself: {min(factors):g} to {max(factors):g}." in text
    assert str(pool_table(found)) in text
    assert "(Python\nand YAML: tune.html)" in text or "(Python and" in text
    assert text.endswith(blocks(found)[0].text)
    # The smallest factors for some shares, and the recommended one.
    rows = text.split("lost tokens")[1].split("\n\n")[0].splitlines()[1:]
    shown = [float(row.removeprefix(">").split()[0]) for row in rows]
    for share in (0.1, 0.05, 0.01, 0.001, 0.0):
        smallest = next(o.factor for o in found.options if o.dropped <= share)
        assert smallest in shown
    assert found.chosen.overall.factor in shown and len(shown) <= 7


def test_a_warning_is_in_the_text_and_on_the_page():
    young = study(synthetic_trace("drift", SIZES, strength=2.0), Target(), name="x")
    (warning,) = young.chosen.warnings()
    assert warning in " ".join(summary(young, Path("tune.html")).split())
    assert warning in Page(html(young, {})).texts["recommendation"]
    alone = studied(pools=("rank",))
    assert "pool" not in summary(alone, Path("x")).replace("capacity_pool", "").replace("-pool", "")


class Page(HTMLParser):
    """Sections by id with their text, and table rows."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.section = "head"
        self.texts: dict[str, str] = {"head": ""}
        self.rows: dict[str, list[tuple[str, ...]]] = {}
        self.marked: dict[str, list[tuple[str, ...]]] = {}
        self.sources: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        sources = ("src", "href", "xlink:href")
        self.sources += [value or "" for name, value in attrs if name in sources]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.texts[self.section] = ""
            self.rows[self.section], self.marked[self.section] = [], []
        elif tag == "tr":
            self.is_marked = ("class", "marked") in attrs
            self.cells: list[str] = []
        elif tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # Everything is closed, in order.
        if tag == "tr":
            self.rows[self.section].append(tuple(self.cells))
            if self.is_marked:
                self.marked[self.section].append(tuple(self.cells))

    def handle_data(self, data):
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        self.texts[self.section] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page(found):
    drawn = plots.figures(found)
    return Page(html(found, {name: plots.svg(figure) for name, figure in drawn.items()}))


def test_sections_in_reading_order(page):
    assert [*page.texts] == [
        "head",
        "recommendation",
        "settings",
        "figures",
        "factors",
        "layers",
        "method",
    ]
    assert all(text.strip() for text in page.texts.values())
    assert page.open == []
    assert "Capacity for zipf <b>" in page.texts["head"]
    # It needs nothing from elsewhere; a heat map is a picture written out.
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert page.tags.count("figure") == page.tags.count("figcaption") == 3
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in page.sources)


def test_the_page_shows_the_recommendation_and_its_tables(found, page):
    assert page.texts["recommendation"].strip().startswith(found.chosen.sentence())
    pools, layers = pool_table(found), layer_table(found)
    assert page.rows["recommendation"] == [pools.headers, *pools.rows]
    assert page.marked["recommendation"] == [pools.rows[1]]
    assert page.rows["layers"] == [layers.headers, *layers.rows]
    whole = factor_table(found, found.options, brief=False)
    header, *shown = page.rows["factors"]
    assert header == whole.headers
    assert set(shown) <= set(whole.rows) and shown[-1] == whole.rows[-1]
    assert page.marked["factors"] == [whole.rows[whole.marked]]
    trace = "10,240 rows of 240 records, 40 steps, 3 layers; 16 experts, top-2, 2 source ranks"
    assert trace.replace("10,240", f"{found.chosen.replay.demand.sum():,}") in page.texts["method"]


def test_settings_are_those_of_the_recommendation(found, page):
    for per_layer in (False, True):
        for block in blocks(found, per_layer=per_layer):
            assert block.text in page.texts["settings"]
    merged = Page(html(dataclasses.replace(found, layers_of_model=False), {}))
    assert "No settings for each layer" in merged.texts["settings"]
    assert "layer-factors" not in merged.texts["settings"]
