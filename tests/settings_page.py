"""Pages of the programs in docs/reference/: commands, options and settings, from parsers and docstrings."""

import argparse
from dataclasses import replace

import analysis.cli
import cluster.cli
import data_prep.cli
import finetune.cli
import pretrain.cli
from data_prep.explain import Explained, options_of, schema_of, settings_of

PARSERS = {
    "data_prep": data_prep.cli.make_parser,
    "pretrain": pretrain.cli.make_parser,
    "finetune": finetune.cli.make_parser,
    "analysis": analysis.cli.make_parser,
    "wide-mlps": cluster.cli.make_parser,
}
HEAD = """# How to read the reference

These pages are generated from the code by `make docs`. In a terminal, `PROGRAM explain COMMAND [KEY]` prints the same text:

```sh
pretrain explain train optimizer.lr
```

## Settings on the command line

Write a setting as `key=value`. The last word of a key is enough if no other setting of the command ends with it:
`lr=1e-4` means `optimizer.lr=1e-4`. In `train` and `tune`, `epochs=20` is short for `train.duration="20 epochs"`.
A value is YAML. Quote characters that the shell would change: `betas='[0.9, 0.99]'`.

## Completion

An editor with the YAML language server completes and checks a config that begins with this line:

```yaml
# yaml-language-server: $schema=../schemas/train.json
```

`make settings` writes one schema per command into `configs/schemas/`.
Bash completes commands, options and keys after this line. Zsh first needs `autoload -U bashcompinit; bashcompinit`.

```sh
eval "$(register-python-argcomplete data_prep pretrain finetune analysis wide-mlps)"
```
"""


def command_pages() -> dict[str, str]:
    """Return {program: the text of its page}."""
    seen = dict[object, str]()
    return {name: _program_page(name, seen) for name in PARSERS}


def _program_page(name: str, seen: dict[object, str]) -> str:
    parser = PARSERS[name]()
    text = f"# {name}\n\n{parser.description}\n"
    for word, verb in parser.commands.items():
        if word == "explain":
            continue
        schema, title = schema_of(verb), f"{name} {word}"
        text += f"\n## {title}\n\n{verb.description or ''}\n\n```sh\n"
        text += "\n".join(_examples(verb)) + "\n```\n" + _options(options_of(verb))
        if schema in seen:
            text += f"\nSettings: the settings of {_link(seen[schema])}.\n"
        elif schema is not None:
            seen[schema] = title
            text += _settings(settings_of(verb), seen, title)
    return text


def _link(title: str) -> str:
    return f"[`{title}`]({title.split(maxsplit=1)[0]}.md#{title.replace(' ', '-')})"


def _examples(verb: argparse.ArgumentParser) -> list[str]:
    """Return the command lines in the help."""
    return [line.strip() for line in (verb.epilog or "").splitlines() if line.startswith("  ")]


def _settings(settings: list[Explained], seen: dict[object, str], title: str) -> str:
    """Return one part per section. A section that an earlier command has is a link."""
    sections: dict[tuple[str, str], list[Explained]] = {}
    for each in settings:
        sections.setdefault((each.key.rpartition(".")[0], each.kind), []).append(each)
    text = ""
    for (prefix, kind), rows in sections.items():
        name = f"`{prefix}.*`" + f", kind {kind}" * bool(kind) if prefix else "General settings"
        text += f"\n### {name} {{ #{_anchor(title, prefix or 'settings', kind)}-section }}\n\n"
        before = seen.setdefault(tuple(replace(row, example="", short=()) for row in rows), title)
        if before != title:
            text += f"As in {_link(before)}.\n"
            continue
        text += rows[0].section + "\n"
        text += "".join(
            _setting(row, title) for row in rows if row.key.rpartition(".")[2] != "kind"
        )
    return text


def _anchor(title: str, key: str, kind: str) -> str:
    return "-".join(filter(None, (*title.split()[1:], kind, key)))


def _setting(row: Explained, title: str) -> str:
    facts = [f"Type: {row.type}"]
    facts += ["Required" if row.default is None else f"Default: `{row.default}`"]
    facts += [f"Example: `{row.example}`"] * bool(row.example)
    lines = "\n".join(f"- {fact}" for fact in facts)
    return f"\n#### `{row.key}` {{ #{_anchor(title, row.key, row.kind)} }}\n\n{row.meaning}\n\n{lines}\n"


def _options(rows: list[Explained]) -> str:
    lines = ["\n"]
    for row in rows:
        default = "required" if row.default is None else f"default: `{row.default}`"
        facts = f"{row.type}, {default}" if row.default != "" else row.type
        lines.append(f"- `{row.key}` ({facts}): {row.meaning}\n")
    return "".join(lines)
