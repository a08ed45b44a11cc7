"""Write docs/reference/ and configs/schemas/ from the code: `make settings` and `make docs`."""

import inspect
import re
from typing import Any

import wide_mlps
from cluster.schemas import write_schemas
from pretrain.models.listing import COLUMNS, FAMILIES, list_models
from tests.budgets import REPOSITORY
from tests.settings_page import HEAD, command_pages

FOLDER = REPOSITORY / "docs/reference"
MODELS_HEAD = """# Models

`pretrain models` prints these tables. `preset=NAME` chooses a model in a config or on the command line.

- params: parameters with a head of 1,000 classes, or 10 classes for images of at most 32 px.
- MACs: multiply-accumulate operations of one image's forward pass. Papers often count two FLOPs per MAC.
- S, C: tokens and channels of a Mixer.
- width m: hidden width of the equivalent wide MLP.
- Omega: average number of connections per layer.
- px: image size.
"""
API_HEAD = """# Python API

`import wide_mlps` has these names. [From Python](../python.md) shows them in use.
"""


def models_page() -> str:
    """Return one table of named models per family, without its empty columns."""
    text = MODELS_HEAD
    rows, _ = list_models()
    for family, title in FAMILIES.items():
        table = zip(COLUMNS, *(row.cells for row in rows if row.spec.kind == family), strict=True)
        head, *members = zip(*(column for column in table if any(column[1:])), strict=True)
        text += f"\n## {title}\n\n" + _line(head) + _line(["---"] * len(head))
        text += "".join(_line([f"`{name}`", *cells]) for name, *cells in members)
    return text


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |\n"


def api_page() -> str:
    """Return the signature and docstring of each public name of `wide_mlps`."""
    text = API_HEAD
    for name in wide_mlps.__all__:
        found = getattr(wide_mlps, name)
        if callable(found):
            text += f"\n## {name}\n\n" + _described(name, found)
            methods = vars(found).items() if inspect.isclass(found) else ()
            for method, member in methods:
                function = getattr(member, "__func__", member)
                if method[0] != "_" and inspect.isfunction(function) and function.__doc__:
                    text += f"\n### {name}.{method}\n\n" + _described(f"{name}.{method}", function)
    return text


def _described(name: str, found: Any) -> str:
    signature = re.sub(r"(?<=[:>] )'([^']+)'", r"\1", str(inspect.signature(found)))
    signature = re.sub(r"(?:\w+\.)+(?=[A-Z])|\b(?:self|cls)(?:, |(?=\)))", "", signature)
    text = inspect.getdoc(found) or ""
    text = "" if text.startswith(f"{found.__name__}(") else text  # dataclass wrote it
    return f"```python\n{name}{signature}\n```\n\n{text}\n"


def write_pages() -> None:
    """Write all pages of the reference."""
    FOLDER.mkdir(exist_ok=True)
    pages = {"index": HEAD, "models": models_page(), "api": api_page(), **command_pages()}
    for name, text in pages.items():
        (FOLDER / f"{name}.md").write_text(text)


if __name__ == "__main__":
    write_pages()
    write_schemas(REPOSITORY / "configs/schemas")
