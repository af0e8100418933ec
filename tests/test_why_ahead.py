"""`notebooks/why_ahead.py` changes what it names: the rows that are dropped, or the router."""

import json
from statistics import mean

from notebooks import why_ahead


def test_contenders_drop_as_they_say(tmp_path):
    out = tmp_path / "why.json"
    why_ahead.main(["--cpu", "--steps", "2", "--seeds", "1", "--out", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    rows = {row["contender"]: row for row in run["rows"]}
    assert list(rows) == list(why_ahead.CONTENDERS)
    first = {name: row["loss"][0] for name, row in rows.items()}
    share = {name: mean(row["dropped"]) for name, row in rows.items()}
    # The same weights and text: before an update only dropped rows make a difference.
    assert first["dropless"] == first["balanced router"]
    others = [first[name] for name in rows if name != "balanced router"]
    assert len(set(others)) == 4
    assert all(abs(of - share["dropless"]) < 0.05 for of in share.values())
    assert share["balanced router"] < share["dropless"]
