"""The lines of terminal output."""

from padded_dispatch.bench.table import line, table

STOCK = {
    "model": "tiny",
    "ep": 2,
    "tokens": 64,
    "skew": "uniform",
    "capacity_factor": 1.25,
    "contender": "stock-drop-pad",
    "variant": None,
    "graph": "layer",
    "main_grad": "none",
    "fill": 0.78,
    "ms": 5.0,
    "floor_ms": 2.5,
    "host_ms": 0.5,
    "allocated_gib": 1.5,
    "tflops_per_gpu": 300.0,
    "error": None,
    "seconds": 4.2,
}
OURS = STOCK | {"contender": "ours", "variant": "module", "ms": 4.0, "allocated_gib": None}
OTHER_FACTOR = OURS | {"capacity_factor": 2.0, "floor_ms": None}
BROKEN = OURS | {"graph": "none", "error": "ValueError: no"}
FUSED = OURS | {"main_grad": "fused"}
DROPLESS = STOCK | {"contender": "stock-dropless", "capacity_factor": None, "graph": "none"}


def test_line():
    expected = "tiny EP2 T64 uniform CF1.25 stock-drop-pad graphed: 5.000 ms, host 0.500 (4 s)"
    assert line(STOCK) == expected
    assert line(BROKEN) == "tiny EP2 T64 uniform CF1.25 ours module: FAILED: ValueError: no (4 s)"
    assert line(DROPLESS).startswith("tiny EP2 T64 uniform stock-dropless: ")


def test_table_compares_with_stock_of_the_same_factor_and_graph():
    given = [STOCK, OURS, OTHER_FACTOR, BROKEN, DROPLESS, FUSED]
    title, header, *rows = table(given).splitlines()
    assert title == "tiny, EP 2, 64 tokens per rank, uniform"
    assert header.split("  ")[1].strip() == "contender"
    found = [" ".join(row.split()) for row in rows if row]
    assert found == [
        "stock-drop-pad graphed 1.25 78.0% 5.000 1.000 2.00 0.500 1.50 300.0",
        "ours module graphed 1.25 78.0% 4.000 0.800 1.60 0.500 - 300.0",
        "ours module graphed 2 78.0% 4.000 - - 0.500 - 300.0",
        "ours module 1.25 failed - - - - - -",
        "stock-dropless - 78.0% 5.000 - 2.00 0.500 1.50 300.0",
        "ours module graphed main_grad fused 1.25 78.0% 4.000 - 1.60 0.500 - 300.0",
    ]


def test_each_layer_layout_and_routing_has_its_block():
    text = table([STOCK, STOCK | {"ep": 1}, OURS])
    assert [line for line in text.splitlines() if line.startswith("tiny")] == [
        "tiny, EP 2, 64 tokens per rank, uniform",
        "tiny, EP 1, 64 tokens per rank, uniform",
    ]
