"""The report as a browser sees it: its elements, its numbers, and nothing from elsewhere."""

import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import pytest

from padded_dispatch.tune import plots
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.menu import menu
from padded_dispatch.tune.recommend import Target
from padded_dispatch.tune.report import factor_table, html, layer_table
from padded_dispatch.tune.settings import blocks
from padded_dispatch.tune.study import Layer, Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.time_model import shipped

SIZES = TraceSizes(num_steps=60, num_layers=3, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Sections by id with their text, table rows, and what each SVG contains."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.section = None
        self.texts: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.marked: dict[str, list[str]] = {}
        self.svgs: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]
            self.texts[self.section] = ""
            self.rows[self.section] = []
        elif tag == "svg":
            self.svgs.append([])
        elif tag == "tr":
            self.rows[self.section].append([])
            if ("class", "marked") in attrs:
                self.marked[self.section] = self.rows[self.section][-1]
        elif tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if "svg" in self.open and tag in ("path", "text", "use"):
            self.svgs[-1].append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # Everything is closed, in order.

    def handle_data(self, data):
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        if self.section is not None:
            self.texts[self.section] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[self.section][-1][-1] += data


def studied(*, layer=True, name="zipf", kind="zipf", pools=("expert",)):
    question = Question(
        target=Target(drop=0.01, steps_share=0.9),
        eval_target=Target(drop=0.0, steps_share=0.9),
        pools=pools,
    )
    sizes = LayerSizes(num_tokens=40, hidden_size=64, ffn_size=48, num_layers=3)
    costed = Layer(sizes=sizes, time_model=shipped()) if layer else None
    return study(synthetic_trace(kind, SIZES, seed=1), question, name=name, layer=costed)


@pytest.fixture(scope="module")
def found():
    return studied()


@pytest.fixture(scope="module")
def text(found):
    drawn = plots.figures(found)
    return html(found, {name: plots.svg(figure) for name, figure in drawn.items()})


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_sections_in_reading_order(page):
    assert list(page.texts) == [
        "recommendation",
        "menu",
        "settings",
        "figures",
        "factors",
        "layers",
        "caveats",
        "method",
    ]
    assert all(text.strip() for text in page.texts.values())
    assert page.open == []


def test_the_answer_comes_first(found, page):
    answer = page.texts["recommendation"]
    assert answer.strip().startswith(found.training.sentence())
    assert f"{found.evaluation.overall.factor:g}" in answer


def test_tables_show_the_recommendation(found, page):
    table = factor_table(found)
    assert page.rows["factors"] == [list(row) for row in (table.headers, *table.rows)]
    factor = found.training.overall.factor
    assert page.marked["factors"][:2] == [f"{factor:g}", str(found.training.overall.capacity)]
    choices = menu(found)
    assert page.rows["menu"] == [list(row) for row in (choices.headers, *choices.rows)]
    assert page.marked["menu"][0] == f"{factor:g}"
    layers = layer_table(found)
    assert page.rows["layers"] == [list(row) for row in (layers.headers, *layers.rows)]


def test_settings_are_those_of_the_recommendation(found, page):
    for per_layer in (False, True):
        for block in blocks(found, per_layer=per_layer):
            assert block.text in page.texts["settings"]
            assert block.target in page.texts["settings"]


def test_every_figure_is_drawn(page):
    assert len(page.svgs) == 4
    for shapes in page.svgs:
        assert shapes.count("path") > 5
        assert shapes.count("text") > 5


def test_it_needs_nothing_from_elsewhere(page, text):
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value is not None
            # Inside the same file; a heat map is a picture written out.
            assert value.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in text
    assert "url(http" not in text


def test_costs_are_marked_as_modelled(found, page):
    assert found.layer is not None
    assert found.layer.time_model.describe() in page.texts["caveats"]


def test_without_sizes_and_figures_it_is_shorter():
    page = Page(html(studied(layer=False), {}))
    assert "figures" not in page.texts
    assert "Costs are missing: give --hidden-size and --ffn-size." in page.texts["caveats"]


def test_a_missing_promise_has_a_caveat():
    page = Page(html(studied(kind="drift"), {}))
    assert "without a promise" in page.texts["recommendation"]
    assert "Training: the need changes over the trace" in page.texts["caveats"]


def test_a_name_is_text_and_nothing_else():
    page = Page(html(studied(name="<script>alert(1)</script> & co"), {}))
    assert "script" not in page.tags


def test_a_balanced_router_is_shown_where_an_expert_has_its_own_slots(found, text):
    pooled = studied(pools=("expert", "rank"))
    assert (found.pool, pooled.pool) == ("expert", "rank")
    page = html(pooled, {"dropped": "<svg></svg>"})
    for shown, place in ((text, found), (page, pooled)):
        has = place is found
        assert ("balanced" in factor_table(place).headers) is has
        assert ("Balanced: " in shown, "perfectly balanced router" in shown) == (has, has)


# Loads the report in frames of two widths; the browser prints this page with what it measured.
FRAMES = """<!DOCTYPE html><meta charset="utf-8"><title>-</title>
<iframe width="1280" style="border: 0" srcdoc="{page}"></iframe>
<iframe width="390" style="border: 0" srcdoc="{page}"></iframe>
<script>
const wider = e => e.scrollWidth > e.clientWidth;
onload = () => {{
  const pages = [...document.querySelectorAll("iframe")].map(e => e.contentDocument);
  document.title = pages.map(page => page.documentElement.scrollWidth + " "
    + [...page.querySelectorAll(".scroll, pre")].filter(wider).length).join(", ");
}};
</script>
"""
BROWSER = """chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-sync
--disable-background-networking --disable-component-update --hide-scrollbars --dump-dom
--window-size=1400,1000"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_page_fits_a_laptop_and_a_phone(text, tmp_path):
    """On a phone the seven tables and figures that are wider scroll, the page does not."""
    (file := tmp_path / "frames.html").write_text(FRAMES.format(page=escape(text)))
    done = subprocess.run(
        [*BROWSER.split(), f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert re.findall("<title>(.*?)</title>", done.stdout) == ["1280 0, 390 7"]
