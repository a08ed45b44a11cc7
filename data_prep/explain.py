"""Command lines of all programs, and `PROGRAM explain`: each option and setting of a command with
its meaning, type, default and an example.

`explain`, `--help`, completion, the settings page and the JSON schemas have the same sources. These
are the command's parser, its settings class (`set_defaults(schema="module:Class")`), and the
docstrings below the fields. Docstrings are parsed on demand, so they do not delay loading a config.
The examples of a command are its `epilog`, one per line.
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
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel

from data_prep import __version__
from data_prep.errors import Code, SettingsError
from data_prep.settings import (
    ALIASES,
    Settings,
    dump,
    example_of,
    in_yaml,
    models_of,
    nearest,
    sections_of,
    tag_of,
    words_of,
)


@dataclass(frozen=True)
class Explained:
    key: str
    meaning: str
    type: str
    default: str | None
    """Default as text; None if the key is required."""
    example: str = ""
    short: tuple[str, ...] = ()
    """Shorthands for the key on the command line."""
    words: tuple[str, ...] = ()
    """All possible values, if these are words."""
    kind: str = ""
    """Value of the section's `kind`, if only some kinds have the key."""
    section: str = ""
    """Description of the key's section."""

    def is_meant_by(self, word: str) -> bool:
        """Return True if the word names this key or its section."""
        names = (self.key, *self.short, *(option.lstrip("-") for option in self.key.split(", ")))
        return word in names or self.key.startswith(f"{word}.") or self.key.endswith(f".{word}")

    def lines(self, width: int) -> Iterator[str]:
        yield self.key + (f" (kind: {self.kind})" if self.kind else "")
        default = "none; it is required" if self.default is None else self.default
        parts = {"": self.meaning, "type": self.type, "default": default, "example": self.example}
        for label, text in parts.items():
            head = f"    {label + ':':9}" if label else "    "
            wrapper = textwrap.TextWrapper(width, head, " " * len(head))
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            yield from wrapper.wrap(text)


# ---- the parser of a program


class Parser(argparse.ArgumentParser):
    """An argument parser that prints each mistake like a `SettingsError`: field, problem, fix and
    code."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(exit_on_error=False, **facts)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.commands: dict[str, Parser] = {}
        """Parsers of the commands, if this is the parser of a program."""

    def add_argument(self, *names: str, **facts: Any) -> argparse.Action:
        if "choices" in facts:
            facts.setdefault("type", one_of(facts["choices"]))
        return super().add_argument(*names, **facts)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Accept `key.path=value` words after options, too, unlike argparse."""
        words = list(sys.argv[1:] if args is None else args)
        self._check_command(next((word for word in words if not word.startswith("-")), None))
        try:
            options, rest = super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:
            problem, _, fix = error.message.partition(". ")
            fix = fix or f"see {self.prog} --help"
            self._fail(error.argument_name or "arguments", problem, fix, code="bad-value")
        if not self.commands and not any(word.startswith("-") for word in rest):
            if not hasattr(options, "overrides") and rest:
                fix = f"write {self._shortest_line()}"
                self._fail(rest[0], "it is not expected", fix, code="bad-syntax")
            if rest:
                options.overrides, rest = [*options.overrides, *rest], []
        for option in (word.partition("=")[0] for word in rest if word.startswith("-")):
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            fix = f"see {self.prog} --help; write settings without dashes, as key.path=value"
            fix = f"did you mean {near[0]}?" if near else fix
            self._fail(option, "this option does not exist", fix, code="unknown-key")
        return options, rest

    def _check_command(self, word: str | None) -> None:
        if word is not None and self.commands and word not in self.commands:
            fix = nearest(word, self.commands)
            if re.search(r"[./=]", word):
                fix = f"write the command first, such as {self.prog} {next(iter(self.commands))}"
            self._fail("COMMAND", f"{word!r} is not a command", fix, code="unknown-name")

    def error(self, message: str) -> NoReturn:
        """Report a missing argument or command. `parse_known_args` reports other errors."""
        fix = f"write {self._shortest_line()}; {self.prog} --help explains it"
        if self.commands:
            message, fix = "a command is missing", f"choose one of {', '.join(self.commands)}"
        self._fail("arguments", message, fix, code="missing-value")

    def _fail(self, field: str, problem: str, fix: str, *, code: Code) -> NoReturn:
        error = SettingsError(field, problem, fix, code=code)
        self.exit(2, f"{self.prog.split()[0]}: {error.with_codes()}\n")

    def _shortest_line(self) -> str:
        words = [self.prog]
        for action in self._actions:
            if action.required:
                words += [*action.option_strings[:1], str(action.metavar or action.dest.upper())]
        return " ".join(words)


class Verbs:
    """The commands of a program, added by its modules."""

    def __init__(self, parser: Parser):
        self._subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
        self.choices = parser.commands

    def add_parser(self, name: str, *, help: str, **facts: Any) -> Parser:
        """Add a command. Its description is by default its `help`."""
        facts["description"] = facts.get("description") or f"{help[0].upper()}{help[1:]}."
        self.choices[name] = verb = self._subparsers.add_parser(name, help=help, **facts)
        return verb


def program(name: str, *, description: str, add_verbs: Callable[[Verbs], None]) -> Parser:
    """Return the parser of a program with --version, `explain`, `show`, completion, and complete
    help texts."""
    parser = Parser(prog=name, description=description)
    version = f"{name} of wide-mlps {__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and stop"
    )
    verbs = Verbs(parser)
    add_verbs(verbs)
    known = dict(verbs.choices)
    explain = verbs.add_parser(
        "explain",
        help="explain the settings of a command: meaning, type, default and example",
        epilog=f"{name} explain {next(iter(known))}",
    )
    explain.add_argument(
        "verb", type=one_of(known), metavar="COMMAND", help=f"one of {', '.join(known)}"
    )
    explain.add_argument(
        "key",
        nargs="?",
        help="setting (or its last word), section or option to explain (default: all)",
    )
    explain.set_defaults(run=partial(_explain, known), after_a_stop="nothing was changed")
    if shown := {word: verb for word, verb in known.items() if verb.get_default("show") is False}:
        example = (next(iter(shown.values())).epilog or "").partition("\n")[0]
        show = verbs.add_parser(
            "show",
            help="print the resolved settings of a command without running it",
            epilog=example.replace(name, f"{name} show", 1),
        )
        listed = f"one of {', '.join(shown)}"
        show.add_argument("verb", type=one_of(shown), metavar="COMMAND", help=listed)
        about = "arguments of the command: config, key=value, options"
        show.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help=about)
        show.set_defaults(run=partial(_show, shown), after_a_stop="nothing was changed")
    for word, verb in verbs.choices.items():
        verb.epilog = "\n  ".join(["examples:", *(verb.epilog or "").splitlines()])
        if schema_of(verb, resolve=False):
            verb.epilog += f"\nsettings: {name} explain {word} [KEY]"
        verb.description = textwrap.fill(verb.description or "", 100)
        for action in verb._actions:
            if not _names_default(action):
                action.help = f"{action.help} (default: %(default)s)"
    if "_ARGCOMPLETE" in os.environ:  # the shell requests completions
        _complete(parser, known)
    return parser


def _complete(parser: Parser, known: dict[str, Parser]) -> None:
    import argcomplete

    def keys(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        return [word.rstrip("=") for word in completions(known[parsed_args.verb], prefix)]

    for verb in parser.commands.values():
        for action in verb._actions:
            if action.dest in ("overrides", "key"):
                vars(action)["completer"] = (
                    keys if action.dest == "key" else partial(completions, verb)
                )
    argcomplete.autocomplete(parser)


def one_of(words: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts only these words."""

    def word(text: str) -> str:
        if text not in words:
            fix = nearest(text, words)
            raise argparse.ArgumentTypeError(f"{text!r} is not valid. {fix}")
        return text

    return word


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for a whole number of at least `least`."""

    def number(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"{word!r} is not valid. give a whole number of at least {least}"
            )
        return value

    return number


def _names_default(action: argparse.Action) -> bool:
    """Return True if the option has no default, or its help names the default."""
    none = action.default is False or action.default in (None, "", [], {}, argparse.SUPPRESS)
    return none or "default" in (action.help or "")


def completions(verb: argparse.ArgumentParser, prefix: str, **_: object) -> list[str]:
    """Return shell completions of key=value: keys (complete, or their last words) and, after =,
    valid words."""
    known = [each for each in settings_of(verb) if ".N." not in each.key]
    found = [
        f"{key}={word}"
        for each in known
        for key in (each.key, *each.short)
        for word in each.words * ("=" in prefix) or [""]
    ]
    return [word for word in dict.fromkeys(found) if word.startswith(prefix)]


# ---- options and settings of a command


def schema_of(verb: argparse.ArgumentParser, *, resolve: bool = True) -> Any:
    """Return the settings class of the command, or None. Without `resolve`, return only its name
    and import nothing."""
    name = verb.get_default("schema")
    return pkgutil.resolve_name(name) if name and resolve else name


def options_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """Return the options and arguments of a command's parser, except --help."""
    found = []
    for action in verb._actions:
        if action.dest in ("help", "overrides") or action.help == argparse.SUPPRESS:
            continue
        returned: Any = getattr(action.type, "__annotations__", {}).get("return", action.type)
        kind = {int: "whole number", float: "number", Path: "path"}.get(returned, "text")
        if action.choices and action.dest != "verb":
            kind = _listed(map(str, action.choices))
        elif action.nargs == 0:
            kind = "flag without a value"
        key = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        meaning = (action.help or "") % {**vars(action), "prog": verb.prog}
        default = None if action.required else "" if _names_default(action) else str(action.default)
        found.append(Explained(key, meaning, kind, default))
    return found


def settings_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """Return all settings in their order, including settings in sections and in lists of
    sections."""
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
            continue  # explained at its first occurrence
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
    """Return {key of a setting or section: further settings that its example needs}. Outer sections
    take precedence over inner sections."""
    found: dict[str, str | None] = {}
    for prefix, section in sections_of(schema):
        for each in section.__mro__:
            for name, words in vars(each).get("example_with", {}).items():
                found.setdefault(f"{prefix}{name}", words and words.replace("{}", prefix))
    return found


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return {field: the docstring below it}, from the class or its base classes."""
    own = (each for each in reversed(section.__mro__) if issubclass(each, Settings))
    return {
        name: text
        for each in own
        for name, text in _docstrings_in(each.__module__).get(each.__name__, {}).items()
    }


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Return {class: {field: text}}. Pydantic's `use_attribute_docstrings` would delay all commands
    by 60 ms."""
    found: dict[str, dict[str, str]] = {}
    classes = ast.parse(inspect.getsource(sys.modules[module])).body
    for node in [each for each in classes if isinstance(each, ast.ClassDef)]:
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                words = " ".join(str(ast.literal_eval(text.value)).split())
                found.setdefault(node.name, {})[ast.unparse(field.target)] = words
    return found


def type_of(annotation: Any, metadata: Any = ()) -> str:
    """Return the type of a setting in words, with bounds."""
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
    """Return a JSON schema, so that editors complete keys and show their descriptions."""
    made = schema.model_json_schema()
    for _, section in sections_of(schema, in_lists=True):
        properties = (made if section is schema else made["$defs"][section.__name__])["properties"]
        for name in properties.keys() & (meanings := docstrings(section)):
            properties[name] = dict(
                sorted({**properties[name], "description": meanings[name]}.items())
            )
    return json.dumps(made, indent=1) + "\n"


# ---- the commands `show` and `explain`


def _show(verbs: dict[str, Parser], options: argparse.Namespace) -> int:
    chosen = verbs[options.verb].parse_args(options.words)
    chosen.show = True
    return int(chosen.run(chosen))


def show(settings: Settings) -> int:
    print(dump(settings), end="")
    return 0


def _explain(verbs: dict[str, Parser], options: argparse.Namespace) -> int:
    verb, key = verbs[options.verb], options.key
    known = [*options_of(verb), *settings_of(verb)]
    chosen = [each for each in known if key is None or each.is_meant_by(key.partition("=")[0])]
    if not chosen:
        raise _unknown(options.verb, key, known)
    width, about = min(shutil.get_terminal_size((110, 24)).columns, 110), ""
    if key is None:
        print(verb.format_usage())
    for each in chosen:
        if key is None and each.section not in ("", about):
            print(f"---- {each.section}\n")
        about = each.section
        print("\n".join(each.lines(width)), end="\n\n")
    return 0


def _unknown(verb: str, key: str, known: list[Explained]) -> SettingsError:
    words = {
        word for each in known for word in (*re.split(r"\.|, ", each.key), each.key, *each.short)
    }
    meant = [word for word in ALIASES.get(key.rpartition(".")[2].lower(), ()) if word in words]
    fix = f"did you mean {' or '.join(map(repr, meant))}?" if meant else nearest(key, words)
    if not fix.endswith("?"):
        fix = nearest(key, {each.key.partition(".")[0] for each in known})
    return SettingsError(key, f"{verb} has no such setting or option", fix, code="unknown-key")
