"""What a verb can be given: each option and setting with its meaning, its type, its default and an
example.

`PROGRAM explain`, `--help`, completion, docs/settings.md and the schemas in configs/schemas/ have
one source: the verb's parser, the settings that it names with
`set_defaults(schema="module:Class")`, and the docstrings under their fields. These are parsed when
somebody asks, so loading a config costs nothing more. The examples of a verb are its `epilog`, a
line each.
"""

import argparse
import ast
import difflib
import inspect
import json
import os
import pkgutil
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel

from data_prep.errors import SettingsError
from data_prep.settings import (
    ALIASES,
    Settings,
    example_of,
    in_yaml,
    models_of,
    nearest,
    sections_of,
    tag_of,
    words_of,
)

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


@dataclass(frozen=True)
class Explained:
    key: str
    meaning: str
    type: str
    default: str | None
    """None: it must be given."""
    example: str = ""
    short: tuple[str, ...] = ()
    """Words of the command line that stand for the key."""
    words: tuple[str, ...] = ()
    """All that it may be, where these are words."""
    kind: str = ""
    """Of the section that it is in, where the key alone does not say which."""
    section: str = ""
    """What its section is."""

    def is_meant_by(self, word: str) -> bool:
        """One of its names, or the section that it is in."""
        names = (self.key, *self.short, *(option.lstrip("-") for option in self.key.split(", ")))
        return word in names or self.key.startswith(f"{word}.") or self.key.endswith(f".{word}")

    def lines(self, width: int) -> Iterator[str]:
        kind = f" (kind: {self.kind})" if self.kind else ""
        yield f"{self.key}{kind}"
        default = "none; it must be given" if self.default is None else self.default
        for label, text in {
            "": self.meaning,
            "type": self.type,
            "default": default,
            "example": self.example,
        }.items():
            head = f"    {label + ':':9}" if label else "    "
            if text:
                yield from textwrap.wrap(
                    text,
                    width,
                    initial_indent=head,
                    subsequent_indent=" " * len(head),
                    **_WHOLE_WORDS,
                )


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}

# ---- the parser of a program
# ------------------------------------------------------------------------------------------


def program(
    name: str, *, description: str, add_verbs: Callable[[Verbs], None]
) -> argparse.ArgumentParser:
    """With what all programs have: --version, `explain`, examples and defaults in every help,
    completion."""
    parser = Parser(prog=name, description=description)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verbs(verbs)
    known = dict(verbs.choices)
    explain = verbs.add_parser(
        "explain",
        help="what a verb can be given: meaning, type, default and example of each setting",
    )
    explain.epilog = f"{name} explain {next(iter(known))}"
    explain.add_argument(
        "verb", choices=list(known), metavar="VERB", help=f"one of {', '.join(known)}"
    )
    explain.add_argument(
        "key",
        nargs="?",
        help="a setting or its last word, a section, or an option; all of them without",
    )
    explain.add_argument(
        "--json-schema",
        action="store_true",
        help="print the settings as a JSON schema, for editors",
    )
    explain.set_defaults(run=partial(_explain, known), after_a_stop="nothing was changed")
    for word, verb in verbs.choices.items():
        verb.epilog = "\n  ".join(["examples:", *(verb.epilog or "").splitlines()])
        verb.epilog += (
            f"\nsettings: {name} explain {word} [KEY]" if schema_of(verb, resolve=False) else ""
        )
        verb.formatter_class = _Help
    if "_ARGCOMPLETE" in os.environ:  # the shell asks
        import argcomplete

        def keys(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
            return [word.rstrip("=") for word in completions(known[parsed_args.verb], prefix)]

        for verb in verbs.choices.values():
            for action in verb._actions:
                if action.dest in ("overrides", "key"):
                    vars(action)["completer"] = (
                        keys if action.dest == "key" else partial(completions, verb)
                    )
        argcomplete.autocomplete(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """Its mistakes are one line with the remedy, as those in a config."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """`key.path=value` may follow options, which argparse would not take; every other word that
        is left is a mistake."""
        options, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:
            stray = [
                word for word in rest if word.startswith("-") or not hasattr(options, "overrides")
            ]
            if stray:
                self.error(f"unrecognized arguments: {stray[0]}")
            options.overrides, rest = [*options.overrides, *rest], []
        return options, rest

    def error(self, message: str) -> NoReturn:
        about, _, rest = message.removeprefix("argument ").partition(": ")
        choice, said = (
            re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", rest),
            message.removeprefix("argument "),
        )
        if choice:
            known = re.findall(r"[\w-]+", choice[2])
            hint = (
                f"{about} comes first"
                if re.search(r"[./=]", choice[1])
                else nearest(choice[1], known)
            )
            said = f"{about}: {choice[1]!r} is not one of them; {hint}"
        elif about == "unrecognized arguments" and rest.startswith("--"):
            word = rest.partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
            setting = "settings are written without dashes, as key.path=value"
            said = f"{word}: no such option; " + (
                f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them; {setting}"
            )
        elif about == "unrecognized arguments":
            said = f"{rest}: is one word too many; write {self._wanted()}"
        elif about == "the following arguments are required":
            said = f"{rest} missing; write {self._wanted()}; {self.prog} --help explains"
        elif number := re.fullmatch(r"invalid (int|float) value: (.*)", rest):
            said = (
                f"{about}: {number[2]} will not do; give a {'whole ' * (number[1] == 'int')}number"
            )
        elif rest.startswith("expected "):
            said = f"{said}; {self.prog} --help explains"
        self.exit(2, f"{self.prog}: {said}\n")

    def _wanted(self) -> str:
        """The least that must be written."""
        needed = [action for action in self._actions if action.required]
        words = [
            [*action.option_strings[:1], str(action.metavar or action.dest.upper())]
            for action in needed
        ]
        return " ".join([self.prog, *(word for each in words for word in each)])


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def number(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"{word!r} will not do; give a whole number from {least} up"
            )
        return value

    return number


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} of wide-mlps {version('wide-mlps')}")
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Keeps lines, and adds each default that the words do not mention."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        how = {"initial_indent": indent, "subsequent_indent": f"{indent}    ", **_WHOLE_WORDS}
        return "\n".join(textwrap.fill(line, width, **how) for line in text.splitlines())

    def _get_help_string(self, action: argparse.Action) -> str:
        return (action.help or "") + " (default: %(default)s)" * (not _is_told(action))


def _is_told(action: argparse.Action) -> bool:
    """Whether there is no default, or the words mention it."""
    none = action.default is False or action.default in (None, "", [], {}, argparse.SUPPRESS)
    return none or "default" in (action.help or "")


def completions(verb: argparse.ArgumentParser, prefix: str, **_: object) -> list[str]:
    """Of a key=value that was begun: keys, full or by their last words; after = the words that it
    may be."""
    known = [each for each in settings_of(verb) if ".N." not in each.key]
    found = [
        f"{key}={word}"
        for each in known
        for key in (each.key, *each.short)
        for word in each.words * ("=" in prefix) or [""]
    ]
    return [word for word in dict.fromkeys(found) if word.startswith(prefix)]


# ---- what there is
# --------------------------------------------------------------------------------------------------


def schema_of(verb: argparse.ArgumentParser, *, resolve: bool = True) -> Any:
    """The class of its settings, or None; its name alone without `resolve`, which imports it."""
    name = verb.get_default("schema")
    return pkgutil.resolve_name(name) if name and resolve else name


def options_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """What its parser reads, but for --help."""
    found = []
    for action in verb._actions:
        if action.dest in ("help", "overrides") or action.help == argparse.SUPPRESS:
            continue
        meaning = argparse.HelpFormatter(verb.prog)._expand_help(action) if action.help else ""
        made: Any = getattr(action.type, "__annotations__", {}).get("return", action.type)
        kind = (
            {int: "whole number", float: "number", Path: "path"}.get(made, "text")
            if action.nargs != 0
            else "given or not"
        )
        kind = (
            _listed(map(str, action.choices)) if action.choices and action.dest != "verb" else kind
        )
        default = None if action.required else "" if _is_told(action) else str(action.default)
        found.append(
            Explained(
                ", ".join(action.option_strings) or str(action.metavar or action.dest),
                meaning,
                kind,
                default,
            )
        )
    return found


def settings_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """Its settings in their order, those in sections and lists of sections too."""
    schema = schema_of(verb)
    if schema is None:
        return []
    is_typed = any(action.dest == "overrides" for action in verb._actions)
    forms: dict[str, dict[str, str]] = {}
    for word, keys in words_of(schema).items():
        for key, form in keys.items() if len(keys) == 1 else ():
            forms.setdefault(key, {})[word] = form
    found, listed, needs = [], set[type[BaseModel]](), _needs_of(schema)
    for prefix, section in sections_of(schema, in_lists=True):
        if section in listed:
            continue  # explained where it stood first
        listed.add(section)
        meanings, about = docstrings(section), " ".join((section.__doc__ or "").split())
        for name, field in section.model_fields.items():
            if models_of(field.annotation, in_lists=False):
                continue
            key, value, short = (
                f"{prefix}{name}",
                in_yaml(example_of(field)),
                forms.get(f"{prefix}{name}", {}),
            )
            wanted = [
                words
                for place, words in needs.items()
                if key == place or key.startswith(f"{place}.")
            ]
            if None in wanted:
                continue
            more = " ".join(filter(None, wanted))
            example = ", or ".join(
                f"{word}={shlex.quote(value.removesuffix(form.removeprefix('{}')))} {more}".rstrip()
                for word, form in {key: "{}", **short}.items()
            )
            explained = Explained(
                key=key,
                meaning=about if name == "kind" else meanings.get(name) or field.description or "",
                type=type_of(field.annotation, field.metadata),
                default=(
                    None
                    if field.is_required()
                    else in_yaml(field.get_default(call_default_factory=True))
                ),
                example=example if is_typed and "N." not in prefix else f"{name}: {value}",
                short=tuple(short),
                words=(
                    tuple(map(str, get_args(field.annotation)))
                    if get_origin(field.annotation) is Literal
                    else ()
                ),
                kind=str(tag_of(section) or ""),
                section=about,
            )
            found.append(explained)
    return found


def _needs_of(schema: type[BaseModel]) -> dict[str, str | None]:
    """{key of a setting or a section: words that its example needs}; the schema itself decides over
    its sections."""
    found: dict[str, str | None] = {}
    for prefix, section in sections_of(schema):
        for each in section.__mro__:
            for name, words in vars(each).get("example_with", {}).items():
                found.setdefault(f"{prefix}{name}", words and words.replace("{}", prefix))
    return found


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """{field: the text under it}, in the class or in one that it inherits from."""
    own = (each for each in reversed(section.__mro__) if issubclass(each, Settings))
    return {
        name: text
        for each in own
        for name, text in _docstrings_in(each.__module__).get(each.__name__, {}).items()
    }


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: text}}. Pydantic's own `use_attribute_docstrings` costs every command 60
    ms."""
    found: dict[str, dict[str, str]] = {}
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for node in (each for each in body if isinstance(each, ast.ClassDef)):
        for field, text in pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found.setdefault(node.name, {})[ast.unparse(field.target)] = " ".join(
                    str(text.value.value).split()
                )
    return found


def type_of(annotation: Any, metadata: Any = ()) -> str:
    """In words, with the bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(
            inner[0], [limit for each in inner[1:] for limit in getattr(each, "metadata", [each])]
        )
    if origin is Literal:
        return _listed(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_of(each, metadata) for each in inner))
    if origin is tuple:
        many = f"list of {'' if inner[-1] is Ellipsis else len(inner)}".strip()
        return f"{many} " + re.sub("number|section", r"\g<0>s", type_of(inner[0]), count=1)
    if models_of(annotation, in_lists=False):
        return "section"
    names = {
        bool: "true or false",
        int: "whole number",
        float: "number",
        str: "text",
        NoneType: "null",
        dict: "mapping",
    }
    forms = {"ge": "from {:,}", "gt": "above {:,}", "le": "to {:,}", "lt": "below {:,}"}
    limits = [
        form.format(getattr(each, name))
        for name, form in forms.items()
        for each in metadata
        if hasattr(each, name)
    ]
    return " ".join(
        [names.get(origin or annotation, "text"), *(limits if annotation in (int, float) else [])]
    )


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def json_schema(schema: type[BaseModel]) -> str:
    """For editors, which then complete keys and show what they mean."""
    made = schema.model_json_schema()
    for _, section in sections_of(schema, in_lists=True):
        properties = (made if section is schema else made["$defs"][section.__name__])["properties"]
        for name in properties.keys() & (meanings := docstrings(section)):
            properties[name] = dict(
                sorted({**properties[name], "description": meanings[name]}.items())
            )
    return json.dumps(made, indent=1) + "\n"


# ---- the verb
# --------------------------------------------------------------------------------------------------


def _explain(verbs: dict[str, Parser], options: argparse.Namespace) -> int:
    verb, key = verbs[options.verb], options.key
    schema = schema_of(verb)
    if options.json_schema:
        if schema is None:
            raise SettingsError(
                f"--json-schema: {options.verb} has no settings; see {verb.prog} --help"
            )
        print(json_schema(schema), end="")
        return 0
    chosen = known = [*options_of(verb), *settings_of(verb)]
    if key is not None:
        chosen = [each for each in known if each.is_meant_by(key.partition("=")[0])]
        if not chosen:
            words = {
                word
                for each in known
                for word in (*re.split(r"\.|, ", each.key), each.key, *each.short)
            }
            meant = [
                word for word in ALIASES.get(key.rpartition(".")[2].lower(), ()) if word in words
            ]
            hint = (
                f"did you mean {' or '.join(map(repr, meant))}?"
                if meant
                else nearest(key, sorted(words))
            )
            sections = sorted({each.key.partition(".")[0] for each in known})
            hint = f"known: {', '.join(sections)}" if hint.startswith("known") else hint
            raise SettingsError(f"{key}: unknown to {options.verb}; {hint}")
    width = min(shutil.get_terminal_size((110, 24)).columns, 110)
    if key is None:
        print(verb.format_usage())
    with suppress(BrokenPipeError):  # of `head` or a pager that was left
        about = ""
        for each in chosen:
            if key is None and each.section not in ("", about):
                print(f"---- {each.section}\n")
            about = each.section
            print("\n".join(each.lines(width)), end="\n\n", flush=True)
    return 0
