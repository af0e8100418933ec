"""Tables as text."""

from padded_dispatch.tune.table import Table


def test_text_is_aligned_and_marked():
    table = Table(headers=("a", "long"), rows=(("1", "2"), ("10", "200")), marked=1)
    assert str(table) == "   a  long\n   1     2\n> 10   200"
    assert ">" not in str(Table(headers=("a",), rows=(("1",),)))


def test_a_wide_table_is_split_behind_its_first_column():
    table = Table(
        headers=("factor", "slots", "dropped", "ms"),
        rows=(("1", "32", "5 %", "1.5"), ("1.25", "40", "0.1 %", "1.6")),
        marked=1,
    )
    whole = [
        "  factor  slots  dropped   ms",
        "       1     32      5 %  1.5",
        ">   1.25     40    0.1 %  1.6",
    ]
    split = [
        "  factor  slots",
        "       1     32",
        ">   1.25     40",
        "",
        "  factor  dropped",
        "       1      5 %",
        ">   1.25    0.1 %",
        "",
        "  factor   ms",
        "       1  1.5",
        ">   1.25  1.6",
    ]
    assert table.within(29).splitlines() == str(table).splitlines() == whole
    assert table.within(24).splitlines() == [line[:24] for line in whole] + [
        "",
        "  factor   ms",
        "       1  1.5",
        ">   1.25  1.6",
    ]
    assert table.within(17).splitlines() == table.within(1).splitlines() == split
