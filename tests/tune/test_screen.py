"""What a terminal shows, by its size."""

import dataclasses
from pathlib import Path

import pytest

from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.menu import menu
from padded_dispatch.tune.screen import summary
from padded_dispatch.tune.settings import megatron_lm
from padded_dispatch.tune.study import Layer, Question, Study, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.target import Target
from padded_dispatch.tune.time_model import shipped

FOLDER = Path("tune")


@pytest.fixture(scope="module")
def found() -> Study:
    sizes = TraceSizes(
        num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=16, top_k=2
    )
    trace = synthetic_trace("lognormal", sizes, seed=1)
    trace = dataclasses.replace(trace, layers=trace.layers + 1)
    question = Question(
        target=Target(steps_share=0.9), eval_target=Target(drop=0.0), pools=None, hold_out=0.1
    )
    layer = Layer(
        sizes=LayerSizes(num_tokens=64, hidden_size=2048, ffn_size=768), time_model=shipped()
    )
    return study(trace, question, name="lognormal", layer=layer)


def test_a_pipe_gets_everything(found):
    text = summary(found, FOLDER)
    assert found.training.sentence() in text.splitlines()
    assert found.held_out_sentence() in text.splitlines()
    for words in (
        str(menu(found)),
        megatron_lm(found, per_layer=False),
        "drops nothing at",
        "In studies:",
        "In evaluation:",
        "Each layer by itself:",
        "Python, YAML: tune/settings.md",
    ):
        assert words in text


@pytest.mark.parametrize(("columns", "lines"), [(80, 21), (80, 30), (120, 37), (200, 57)])
def test_a_terminal_shows_no_more_than_fits(found, columns, lines):
    shown = summary(found, FOLDER, columns=columns, lines=lines).splitlines()
    assert len(shown) <= lines
    assert max(map(len, shown)) <= columns
    text = "\n".join(shown)
    assert shown[0].startswith(f"Set the capacity factor to {found.training.overall.factor:g} (")
    assert str(menu(found)) in text
    assert text.endswith(megatron_lm(found, per_layer=False))
    assert "In evaluation:" in text


def test_more_lines_show_more_and_lose_nothing(found):
    last = ""
    for lines in range(10, 60):
        text = summary(found, FOLDER, columns=100, lines=lines)
        assert text.count("\n") >= last.count("\n")
        last = text
    assert last == summary(found, FOLDER, columns=100)


def test_a_tiny_terminal_still_gets_the_answer_the_menu_and_a_block(found):
    text = summary(found, FOLDER, columns=80, lines=5)
    assert text.startswith("Set the capacity factor to")
    assert str(menu(found)) in text
    assert text.endswith(megatron_lm(found, per_layer=False))
    assert "In evaluation" not in text and "drops nothing at" not in text
