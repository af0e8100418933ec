"""Make the relative links and pictures of README.md absolute: an index page shows it alone.

python .ci/absolute_links.py README.md https://HOST/OWNER/padded_dispatch v0.1.0
"""

import re
import sys
from pathlib import Path


def absolute(text: str, address: str, tag: str) -> str:
    """Return Markdown whose links lead to the tag; a link's text may go over two lines."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if re.match(r"#|\w+:", target):
            return found[0]
        return f"{mark}[{label}]({address}/{'raw' if mark else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


if __name__ == "__main__":
    page, address, tag = sys.argv[1:]
    Path(page).write_text(absolute(Path(page).read_text(), address, tag))
