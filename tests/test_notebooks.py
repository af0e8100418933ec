"""The stored notebooks are executed, without errors, small, and free of local paths."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from padded_dispatch.train.arguments import read_compare

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 800_000  # Ten figures at 150 dpi.
# A folder or an address of one machine.
LOCAL = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|work|mnt|Users)/|\b127\.0\.0\.1\b|://")


def text_of(output: Any) -> str:
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), *(v for k, v in data.items() if k != "image/png")])


def faults(notebook: Any) -> list[str]:
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed from top to bottom")
    for output in (output for cell in code for output in cell.outputs):
        if output.output_type == "error":
            found.append(f"error {output.ename}")
        elif output.get("name") == "stderr":
            found.append(f"stderr {output.text}")
        elif LOCAL.search(text_of(output)):
            found.append(f"local {text_of(output)}")
    for cell in code:  # Only the last value of a cell is shown.
        values = [output for output in cell.outputs if output.output_type == "execute_result"]
        if re.search(r"^table\(", cell.source, re.MULTILINE) and not values:
            found.append("a table that is not shown")
    if "**On the command line:**" not in notebook.cells[0].source:
        found.append("no command line")
    return found


def test_notebooks_can_be_read_without_running_them():
    assert [path.name[:2] for path in PATHS] == ["01", "02", "03", "04"]
    for path in PATHS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert faults(notebook) == [], path.name
        assert path.stat().st_size < MAX_BYTES
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert sum(len(source.splitlines()) for source in code) <= 177, path.name


def test_commands_of_studies_measure_held_out_losses():
    page = (FOLDER / "results" / "README.md").read_text().replace("\\\n", " ")
    notebook = nbformat.read(FOLDER / "03_capacity_and_quality.ipynb", as_version=4)
    studies = (page, {0, 1, 2, 3, 4}), (notebook.cells[0].source.replace("\n", " "), {0, 1, 2})
    for text, seeds in studies:
        (flags,) = re.findall(r"padded-dispatch compare ([^`\n]+)", text)
        contenders = read_compare(flags.split())
        assert {given.seed for _, given in contenders} == seeds
        assert all("eval_every" in given for _, given in contenders)


def test_layers_of_one_model_are_one_panel(monkeypatch):
    pytest.importorskip("IPython", reason="figures show themselves with it")
    monkeypatch.syspath_prepend(FOLDER)
    performance = importlib.import_module("performance")
    row = {"model": "x", "contender": "ours", "main_grad": "none", "floor_ms": 1.0}
    shown = []
    monkeypatch.setattr(performance.figures, "show", lambda figure, caption: shown.append(figure))
    performance.draw_layers([row | {"ep": ep, "ms": 4.0 / ep} for ep in (2, 1)], "ep", "ranks")
    (axes,) = shown[0].axes
    drawn = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in axes.lines}
    assert (drawn["ours"], drawn["roofline"]) == ((1, 2, 4.0, 2.0), (1, 2, 1.0, 1.0))


def test_the_newest_row_of_a_contender_is_in_the_table_of_layers(monkeypatch):
    pytest.importorskip("IPython", reason="tables show themselves with it")
    monkeypatch.syspath_prepend(FOLDER)
    performance = importlib.import_module("performance")
    case = {"model": "x", "tokens": 4096, "capacity_factor": 1.25, "main_grad": "fused"}
    case |= {"skew": "uniform", "allocated_gib": 2.0, "flags": {}, "variant": None}
    rows = [
        case | {"contender": "stock-drop-pad", "ms": 9.0},
        case | {"contender": "ours", "variant": "auto", "ms": 4.0},
        case | {"contender": "ours", "variant": "packed", "ms": 6.0, "flags": {"fp8": "e4m3"}},
        case | {"contender": "ours", "variant": "auto", "ms": 3.0},
        case | {"contender": "ours", "variant": "auto", "ms": None},
        case | {"contender": "ours", "variant": "auto", "ms": 1.0, "skew": "lognormal-1.0"},
    ]
    names = ["ours", "stock drop-and-pad", "ours, NCCL, fp8"]
    monkeypatch.setattr(performance, "COLUMNS", names)
    head, _, line = performance.layer_table(rows).data.splitlines()
    assert head == f"| model | tokens | factor | gradients | {' | '.join(names)} | GiB |"
    assert line == "| x | 4,096 | 1.25 | added in fp32 | 3.00 | 9.00 | 6.00 | 2.0, 2.0, 2.0 |"


def test_a_contender_that_drops_nothing_stands_beside_the_usual_factor(monkeypatch):
    pytest.importorskip("IPython", reason="tables show themselves with it")
    monkeypatch.syspath_prepend(FOLDER)
    performance = importlib.import_module("performance")
    fused = {"model": "x", "tokens": 4096, "capacity_factor": None, "main_grad": "none"}
    fused |= {"skew": "uniform", "allocated_gib": 2.0, "flags": {}, "variant": "fuser", "ms": 3.5}
    fused |= {"contender": "stock-dropless", "graph": "layer", "ep": 1, "floor_ms": 1.0}
    padded = fused | {"contender": "stock-drop-pad", "variant": None, "capacity_factor": 1.25}
    eager = fused | {"graph": "none", "ms": 9.0}
    run = {"about": {"commit": "a"}, "rows": [padded | {"ms": 5.0}, fused, eager]}
    monkeypatch.setattr(performance.readme_figures, "runs_in", lambda name: [run])
    rows = performance.layers(ep=1)
    assert [row["capacity_factor"] for row in rows] == [1.25, 1.25]
    head, _, line = performance.layer_table(rows).data.splitlines()
    assert "| stock drop-and-pad | stock dropless, fused experts | GiB |" in head
    assert line == "| x | 4,096 | 1.25 | in bf16 | 5.00 | 3.50 | 2.0, 2.0 |"
    shown = []
    monkeypatch.setattr(performance.figures, "show", lambda figure, caption: shown.append(figure))
    performance.draw_layers(rows, "tokens", "tokens")
    drawn = {line.get_label() for line in shown[0].axes[0].lines}
    assert drawn == {"stock drop-and-pad", "stock dropless, fused experts", "roofline"}


@pytest.mark.parametrize("breaks", [False, True])
def test_stand_ins_leave_an_installed_transformer_engine_alone(breaks, tmp_path, monkeypatch):
    parts = tmp_path / "transformer_engine" / "pytorch"
    parts.mkdir(parents=True)
    (parts.parent / "__init__.py").touch()
    (parts / "__init__.py").write_text("raise OSError('no driver')" if breaks else "Linear = 7")
    (parts / "optimizers.py").write_text("FusedAdam = 8")
    for name in [one for one in sys.modules if one.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    stand_ins = importlib.import_module("bridge_stand_ins")
    monkeypatch.setattr(stand_ins, "NEEDED", {"transformer_engine": "transformer_engine.pytorch"})
    try:
        with stand_ins.importable():
            linear = importlib.import_module("transformer_engine.pytorch").Linear
            if breaks:
                assert isinstance(linear, type)
                with pytest.raises(ImportError):
                    importlib.import_module("transformer_engine.pytorch.optimizers")
            else:
                optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
                assert (linear, optimizers.FusedAdam) == (7, 8)
    finally:
        for name in [one for one in sys.modules if one.startswith("transformer_engine")]:
            del sys.modules[name]
