"""Write docs/settings.md and configs/schemas/ from the parsers and docstrings: `make settings`."""

import argparse
from dataclasses import replace
from pathlib import Path

import analysis.cli
import cluster.cli
import data_prep.commands
import finetune.cli
import pretrain.cli
from cluster.schemas import write_schemas
from data_prep.explain import Explained, options_of, program, schema_of, settings_of

REPOSITORY = Path(__file__).parent.parent
ADD_VERBS = {
    "data_prep": data_prep.commands.add_verbs,
    "pretrain": pretrain.cli._add_verbs,
    "finetune": finetune.cli._add_verbs,
    "analysis": analysis.cli._add_verbs,
    "wide-mlps": cluster.cli.add_verbs,
}
HEAD = """# Options and settings

Made by `make settings` from the docstrings under the settings. In the terminal the same is
`PROGRAM explain VERB [KEY]`, such as `pretrain explain train optimizer.lr`.

On the command line a setting is `key=value`, and the last word of its key is enough where no other setting of the verb ends with
it: `lr=1e-4` is `optimizer.lr=1e-4`. `epochs=20` is short for `train.duration="20 epochs"` in `train` and `tune`. A value is YAML;
quote what the shell would read: `betas='[0.9, 0.99]'`. What a run stores has the full keys.

In an editor with the YAML language server the first line of a config in `configs/pretrain/` may be

```yaml
# yaml-language-server: $schema=../schemas/train.json
```

which completes its keys, shows what they mean and underlines mistakes; [configs/schemas/](../configs/schemas/) has a file for each
verb that reads a config, and `pretrain explain train --json-schema` prints it. Bash completes verbs, options, keys and their words
after `eval "$(register-python-argcomplete data_prep pretrain finetune analysis wide-mlps)"`; zsh, too, after
`autoload -U bashcompinit; bashcompinit`.
"""


def verbs_of(name: str) -> dict[str, argparse.ArgumentParser]:
    return dict(program(name, description="", add_verbs=ADD_VERBS[name]).commands)


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    text, seen = HEAD, dict[object, str]()
    for name in ADD_VERBS:
        text += f"\n## {name}\n"
        for word, verb in verbs_of(name).items():
            if word == "explain":
                continue
            schema, title = schema_of(verb), f"{name} {word}"
            text += (
                f"\n### {title}\n\n```sh\n"
                + "\n".join(_examples(verb))
                + "\n```\n"
                + _table(options_of(verb))
            )
            if schema in seen:
                text += f"\nSettings: those of `{seen[schema]}`.\n"
            elif schema is not None:
                seen[schema] = title
                text += _settings(settings_of(verb), seen, title)
    return text


def _examples(verb: argparse.ArgumentParser) -> list[str]:
    """The command lines of its help."""
    return [line.strip() for line in (verb.epilog or "").splitlines() if line.startswith("  ")]


def _settings(settings: list[Explained], seen: dict[object, str], title: str) -> str:
    """Section by section; one that an earlier verb has, word for word, is named alone."""
    sections: dict[tuple[str, str], list[Explained]] = {}
    for each in settings:
        sections.setdefault((each.key.rpartition(".")[0], each.kind), []).append(each)
    text = ""
    for (prefix, kind), rows in sections.items():
        name = f"`{prefix}.*`" + (f", kind {kind}" if kind else "") if prefix else "Settings"
        before = seen.setdefault(tuple(replace(row, example="", short=()) for row in rows), title)
        text += (
            f"\n{name}: {'as in `' + before + '`.' if before != title else rows[0].section}".rstrip(
                ": "
            )
            + "\n"
        )
        text += _table(rows) if before == title else ""
    return text


def _table(rows: list[Explained]) -> str:
    if not rows:
        return ""
    lines = ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    for each in [row for row in rows if row.key.rpartition(".")[2] != "kind"]:
        default = (
            "must be given" if each.default is None else f"`{each.default}`" if each.default else ""
        )
        cells = (f"`{each.key}`", each.type, default, each.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (REPOSITORY / "docs/settings.md").write_text(settings_page())
    write_schemas(REPOSITORY / "configs/schemas")
