"""The page of the package index: `.ci/build` leaves no relative link in it."""

import importlib.util
import re
from typing import Any

from tests.test_readme import README, ROOT


def absolute_links() -> Any:
    path = ROOT / ".ci" / "absolute_links.py"
    spec: Any = importlib.util.spec_from_file_location("absolute_links", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_absolute_leaves_no_relative_link():
    absolute = absolute_links().absolute
    text = "![a](b.svg), [over\ntwo](c/d.md#e), [here](#speed), [there](https://x/y)"
    assert absolute(text, "https://h/p", "v1") == (
        "![a](https://h/p/raw/v1/b.svg), [over\ntwo](https://h/p/blob/v1/c/d.md#e), "
        "[here](#speed), [there](https://x/y)"
    )
    page = absolute(README.read_text(), "https://h/p", "v1")
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert len(targets) > 10 and all(re.match(r"#|https://", target) for target in targets)
    assert "absolute_links.py" in (ROOT / ".ci" / "build").read_text()
