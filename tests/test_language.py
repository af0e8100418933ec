"""Plain English, as far as a list of words can check it.

Checked are docstrings, comments and texts of the package, error texts that tests expect, and all
pages. Names in code are not. See .github/CONTRIBUTING.md for the rules behind the list.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "padded_dispatch").rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve())
FOLDERS = (".github", "padded_dispatch", "notebooks", "tests")
PAGES = (ROOT / "README.md", *(p for f in FOLDERS for p in sorted((ROOT / f).rglob("*.md"))))

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
FIRST_WORDS = {"Of", "That", "Those", "By", "What", "Where", "Whether", "Who", "Whose", "How"}


def words_to_avoid(text: str) -> list[str]:
    """Return the words of the list that a text has; line breaks count as spaces."""
    return [found.lower() for found in PATTERN.findall(" ".join(text.split()))]


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all strings and comments; comments of several lines as one."""
    comment, first, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if line != last + 1:
                yield first, comment
                comment, first = "", line
            comment, last = f"{comment} {token.string.lstrip('# ')}", line
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield line, token.string
    yield first, comment


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of functions, classes and the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def first_word(docstring: str) -> str:
    """Return the first word without punctuation."""
    return re.split(r"\W", docstring.strip(), maxsplit=1)[0]


def test_package_and_pages_are_in_plain_english():
    """Tests' own prose is free, but for the phrase that errors no longer have."""
    found = [(page.name, words) for page in PAGES if (words := words_to_avoid(page.read_text()))]
    for path in (*PACKAGE, *TESTS):
        source = path.read_text()
        for line, text in texts_of(source):
            words = words_to_avoid(text.replace("\\", ""))
            if path in TESTS:
                words = [word for word in words if word == "is not possible"]
            found += [(f"{path.relative_to(ROOT)}:{line}", words)] if words else []
        for line, text in docstrings(source) if path in PACKAGE else ():
            if first_word(text) in FIRST_WORDS:
                found.append((f"{path.relative_to(ROOT)}:{line}", [first_word(text)]))
    assert found == [], "see AVOID for what to write instead"


def test_these_tests_can_fail():
    source = '''"""Where it is."""
# One rank
# knows of it.
def f():
    """Of both, that nobody
    wants."""
    raise ValueError(f"x={1} is not possible: give 2")
'''
    found = [words for _, text in texts_of(source) for words in words_to_avoid(text)]
    assert sorted(found) == ["is not possible", "nobody", "rank knows"]
    assert [first_word(text) for _, text in docstrings(source)] == ["Where", "Of"]
    assert words_to_avoid("Ranks send, receive and compare; nothing is impossible.") == []
