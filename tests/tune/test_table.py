"""Tables as text."""

from padded_dispatch.tune.table import Table


def test_text_is_aligned_and_marked():
    table = Table(headers=("a", "long"), rows=(("1", "2"), ("10", "200")), marked=1)
    assert str(table) == "   a  long\n   1     2\n> 10   200"
    assert ">" not in str(Table(headers=("a",), rows=(("1",),)))
