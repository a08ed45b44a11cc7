"""Check the language rules of our texts that a program can check: `make lint` runs it.

    python -m tests.language          fails if a package has more violations than its ceiling
    python -m tests.language PATH...  prints the violations of files or folders

Texts are docstrings, comments, help texts, messages (string constants of at least four words) and
Markdown outside code. After fixing violations, lower the ceilings.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.budgets import REPOSITORY

CEILINGS = {
    "data_prep": 0,
    "pretrain": 0,
    "finetune": 0,
    "analysis": 0,
    "cluster": 0,
    "benchmarks": 0,
    "tests": 74,
    "docs": 0,
    "README.md": 0,
    "CONTRIBUTING.md": 0,
}
MOST_WORDS = 25
BANNED = re.compile(
    r"\b(?:anew|once more|beside|mend(?:s|ed)?|goes on|going on|go on|held to|name another"
    r"|will not do|(?:is|are) refused|left out|stands|so many|so long|at the latest|in the end"
    r"|behind training|whole(?! number)|judged|multiply-adds|verbs?|twins?|alone|pictures?"
    r"|analys(?:e|ed|es|ing)|normalis\w+|colours?|neighbours?|behaviour)\b",
    re.IGNORECASE,
)
"""Words of the table in our style guide, and British spellings."""
OPENINGS = re.compile(r"(?:Of|That|By|With|What|Who|Where|Whether|Which)\b")
Text = tuple[int, str, bool]
"""Line, text, and whether it is a docstring."""


def texts_of_python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                docstrings.add(id(statement.value))
                yield statement.lineno, statement.value.value, True
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings and len(node.value.split()) > 3:
            yield node.lineno, node.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(
            ("# type:", "# fmt:", "#!")
        ):
            yield token.start[0], token.string.lstrip("# "), False


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Return paragraphs, list items and headings without code, tables and links' addresses."""
    others = re.compile(r"```.*?```|<svg.*?</svg>|<!--.*?-->", re.DOTALL)
    kept = others.sub(lambda found: "\n" * found[0].count("\n"), source)
    start, paragraph = 1, list[str]()
    for number, line in enumerate([*kept.splitlines(), ""], 1):
        begins = bool(re.match(r"\s*(?:[-*>|#]|\d+\.|!)\s?", line))
        if paragraph and (begins or not line.strip()):
            yield start, " ".join(paragraph), False
            paragraph = []
        if line.strip() and not line.lstrip().startswith("|"):
            start = start if paragraph else number
            paragraph.append(re.sub(r"^\s*(?:[-*>#!]+|\d+\.)\s*", "", line).strip())


def sentences_of(text: str) -> list[str]:
    """Return the sentences, without lines of tables and of aligned columns."""
    lines = [line for line in text.splitlines() if not re.search(r"\S {2,}\S|^\s*\|| \| ", line)]
    plain = re.sub(r"``.*?``|`[^`]*`", "CODE", "\n".join(lines))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    ends = r"(?<=[.!?])[\s)]+|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\n\s{4,}(?=\S+: )"
    return [part for part in re.split(ends, plain) if part.strip()]


def violations_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """Return the line, the rule and the words of each violation."""
    source = path.read_text()
    texts = texts_of_markdown if path.suffix == ".md" else texts_of_python
    for line, text, is_docstring in texts(source):
        plain = re.sub(r"`[^`]*`|\S*/\S*", "", text)  # without code and paths
        for found in BANNED.finditer(plain):
            yield line, "banned word", found[0]
        for sentence in sentences_of(text):
            words = sentence.split()
            if len(words) > MOST_WORDS:
                yield line, "long sentence", f"{len(words)} words: {' '.join(words[:6])} ..."
            if OPENINGS.match(sentence) and not sentence.endswith("?"):
                yield line, "opening", " ".join(words[:5])
        if is_docstring and not re.match(r"[A-Z`\"'\d({\[]|\w+[_.(:=]", text.strip()):
            yield line, "docstring", text.strip()[:40]


def files_below(places: Iterable[Path]) -> list[Path]:
    found = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob("*")))
        if file.suffix in (".py", ".md") and ".venv" not in file.parts
    ]
    return [file for file in found if "reference" not in file.parts]


if __name__ == "__main__":
    if places := [Path(word) for word in sys.argv[1:]]:
        for file in files_below(places):
            for line, rule, words in violations_of(file):
                print(f"{file}:{line}: {rule}: {words}")
        sys.exit()
    too_many = False
    for name, ceiling in CEILINGS.items():
        files = files_below([REPOSITORY / name])
        total = sum(1 for file in files for _ in violations_of(file))
        print(f"{name:16}{total:5} violations of language rules, ceiling {ceiling}")
        too_many |= total > ceiling
    sys.exit("Print them with `python -m tests.language PATH`." if too_many else 0)
