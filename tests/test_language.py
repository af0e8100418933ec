"""Plain English, as far as a list of words can check it: of the package, of pages, of errors.

See .github/CONTRIBUTING.md for the rules behind the list.
"""

import re

from tests.test_readme import PAGES, ROOT

PACKAGE = sorted((ROOT / "padded_dispatch").rglob("*.py"))

# What to write instead stands behind each.
AVOID = {
    r"is not possible": "X must ..., got Y; set Z",
    r"nobody|somebody|someone|anybody|whoever|whomever": "name the actor, or use the passive",
    r"everyone": "all ranks",
    r"(?:ranks?|processes|peers?|workers?) (?:knows?|talks?|tells?|says?|speaks?)": (
        "ranks send, receive, compare, raise"
    ),
    r"agree before they talk": "compare before they communicate",
    r"says so|said so": "name what is logged or raised, and where",
    r"that is to say": "two sentences",
    r"comes? to an end": "ends",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in AVOID), re.IGNORECASE)
# A docstring begins with a verb (functions) or a noun (classes, modules).
FIRST_WORD = re.compile(r'"""(Of|That|Those|By|What|Where|Whether|Who|Whose|How)\b')


def test_package_and_pages_are_in_plain_english():
    found = {
        path.relative_to(ROOT): [
            *PATTERN.findall(re.sub(r'[\s#"\\]+', " ", text)),
            *FIRST_WORD.findall(text),
        ]
        for path, text in ((path, path.read_text()) for path in (*PACKAGE, *PAGES))
    }
    assert {path: words for path, words in found.items() if words} == {}, "see AVOID"
