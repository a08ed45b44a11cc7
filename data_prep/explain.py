"""What a verb can be given: each option and setting with its meaning, its type, its default and an example.

`PROGRAM explain`, `--help`, completion, docs/settings.md and the schemas in configs/schemas/ have one source: the verb's parser,
the settings that it names with `set_defaults(schema="module:Class")`, and the docstrings under their fields. These are parsed when
somebody asks, so loading a config costs nothing more. The examples of a verb are its `epilog`, a line each.
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
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from data_prep.settings import SettingsError, last_words, nearest, sections_of

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


@dataclass(frozen=True)
class Explained:
    key: str
    meaning: str
    type: str
    default: str | None
    """None: it must be given."""
    example: str = ""
    kind: str = ""
    """Of the section that it is in, where the key alone does not say which."""
    section: str = ""
    """What its section is."""

    def lines(self, width: int) -> Iterator[str]:
        kind = f" (kind: {self.kind})" if self.kind else ""
        yield f"{self.key}{kind}"
        default = "none; it must be given" if self.default is None else self.default
        facts = {"type": self.type, "default": default, "example": self.example}
        for label, text in {"": self.meaning, **facts}.items():
            head = f"    {label + ':':9}" if label else "    "
            if text:
                yield from textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), **_WHOLE_WORDS)


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}

# ---- the parser of a program ------------------------------------------------------------------------------------------


def program(name: str, *, description: str, add_verbs: Callable[[Verbs], None]) -> argparse.ArgumentParser:
    """With what all programs have: --version, `explain`, examples and defaults in every help, completion."""
    parser = Parser(prog=name, description=description)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verbs(verbs)
    known = dict(verbs.choices)
    explain = verbs.add_parser("explain", help="what a verb can be given: meaning, type, default and example of each setting")
    explain.epilog = f"{name} explain {next(iter(known))}"
    explain.add_argument("verb", choices=list(known), metavar="VERB", help=f"one of {', '.join(known)}")
    explain.add_argument("key", nargs="?", help="a setting or its last word, a section, or an option; all of them without")
    explain.add_argument("--json-schema", action="store_true", help="print the settings as a JSON schema, for editors")
    explain.set_defaults(run=partial(_explain, known), after_a_stop="nothing was changed")
    for word, verb in verbs.choices.items():
        verb.epilog = "\n  ".join(["examples:", *(verb.epilog or "").splitlines()])
        verb.epilog += f"\nsettings: {name} explain {word} [KEY]" if schema_of(verb, resolve=False) else ""
        verb.formatter_class = _Help
    if "_ARGCOMPLETE" in os.environ:  # the shell asks
        import argcomplete

        def keys(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
            return [word.rstrip("=") for word in completions(known[parsed_args.verb], prefix)]

        for verb in verbs.choices.values():
            for action in verb._actions:
                if action.dest in ("overrides", "key"):
                    vars(action)["completer"] = keys if action.dest == "key" else partial(completions, verb)
        argcomplete.autocomplete(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """Its mistakes are one line with the remedy, as those in a config."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Of a verb the words that are left are overrides, where it has any; every other is a mistake."""
        options, rest = super().parse_known_args(args, namespace)
        stray = [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]
        if stray and self._subparsers is None:
            self.error(f"unrecognized arguments: {stray[0]}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        about, _, rest = message.removeprefix("argument ").partition(": ")
        choice, said = re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", rest), message.removeprefix("argument ")
        if choice:
            known = re.findall(r"[\w-]+", choice[2])
            hint = f"{about} comes first" if re.search(r"[./=]", choice[1]) else nearest(choice[1], known)
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
            said = f"{about}: {number[2]} will not do; give a {'whole ' * (number[1] == 'int')}number"
        elif rest.startswith("expected "):
            said = f"{said}; {self.prog} --help explains"
        self.exit(2, f"{self.prog}: {said}\n")

    def _wanted(self) -> str:
        """The least that must be written."""
        needed = [action for action in self._actions if action.required]
        words = [[*action.option_strings[:1], str(action.metavar or action.dest.upper())] for action in needed]
        return " ".join([self.prog, *(word for each in words for word in each)])


def parse_command_line(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but `key.path=value` overrides may follow options (argparse leaves such words behind)."""
    options, rest = parser.parse_known_args(arguments)
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


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
        words, default = action.help or "", action.default
        is_told = default is None or default is False or default in ([], {}, argparse.SUPPRESS) or "default" in words
        return words if is_told else f"{words} (default: %(default)s)"


def completions(verb: argparse.ArgumentParser, prefix: str, **_: object) -> list[str]:
    """Of a key=value that was begun: keys, full or by their last words; after = the words that it may be."""
    found, schema = dict[str, None](), schema_of(verb)
    if schema is None:
        return []
    short = _short_words(schema)
    for section_prefix, section in sections_of(schema):
        found |= {f"{word}=": None for word in getattr(section, "short_words", {})}
        for name, field in section.model_fields.items():
            key = section_prefix + name
            words = get_args(field.annotation) if get_origin(field.annotation) is Literal and "=" in prefix else [""]
            found |= {f"{each}={word}": None for each in (key, short.get(key, key)) for word in words}
    return [word for word in found if word.startswith(prefix)]


# ---- what there is ----------------------------------------------------------------------------------------------------


def schema_of(verb: argparse.ArgumentParser, *, resolve: bool = True) -> Any:
    """The class of its settings, or None; its name alone without `resolve`, which imports it."""
    name = verb.get_default("schema")
    return pkgutil.resolve_name(name) if name and resolve else name


def options_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """What its parser reads, but for --help."""
    found = []
    formatter = argparse.HelpFormatter(verb.prog)
    for action in verb._actions:
        if action.dest in ("help", "overrides") or action.help == argparse.SUPPRESS:
            continue
        words = formatter._expand_help(action) if action.help else ""
        kind = "given or not"
        if action.nargs != 0:
            made = inspect.signature(action.type).return_annotation if inspect.isfunction(action.type) else action.type
            kind = next((word for each, word in ((int, "whole number"), (float, "number"), (Path, "path")) if made is each), "text")
        kind = _listed(map(str, action.choices)) if action.choices and action.dest != "verb" else kind
        is_told = action.nargs == 0 or action.default in (None, [], {}) or "default" in (action.help or "")
        default = None if action.required else "" if is_told else str(action.default)
        found.append(Explained(", ".join(action.option_strings) or str(action.metavar or action.dest), words, kind, default))
    return found


def settings_of(verb: argparse.ArgumentParser) -> list[Explained]:
    """Its settings in their order, those in sections and lists of sections too."""
    schema = schema_of(verb)
    if schema is None:
        return []
    overridden = any(action.dest == "overrides" for action in verb._actions)
    found, listed, short = [], set[type[BaseModel]](), _short_words(schema)
    for prefix, section in sections_of(schema, in_lists=True):
        if section in listed:
            continue  # explained where it stood first
        listed.add(section)
        kind = section.model_fields.get("kind")
        tag = str(*get_args(kind.annotation)) if kind is not None else ""
        meanings, about = docstrings(section), " ".join((section.__doc__ or "").split())
        for name, field in section.model_fields.items():
            if _is_section(field.annotation):
                continue
            meaning = about if name == "kind" else meanings.get(name) or field.description or ""
            default = None if field.is_required() else _yaml(field.get_default(call_default_factory=True))
            key, value = f"{prefix}{name}", _yaml(_example(field))
            as_word = shlex.quote(value) + (f", or {name}={shlex.quote(value)}" if key in short else "")
            example = f"{key}={as_word}" if overridden and "N." not in prefix else f"{name}: {value}"
            found.append(Explained(key, meaning, type_of(field.annotation, field.metadata), default, example, tag, about))
    return found


@cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """{field: the text under it}, in the class or in one that it inherits from."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        parsed = _classes_of(each.__module__).get(each.__name__) if issubclass(each, BaseModel) else None
        for field, text in zip(parsed.body, parsed.body[1:], strict=False) if parsed is not None else ():
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    if module.startswith("pydantic."):
        return {}
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def type_of(annotation: Any, metadata: Any = ()) -> str:
    """In words, with the bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(inner[0], [limit for each in inner[1:] for limit in getattr(each, "metadata", [each])])
    if origin is Literal:
        return _listed(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_of(each, metadata) for each in inner))
    if origin is tuple:
        many = f"list of {'' if inner[-1] is Ellipsis else len(inner)}".strip()
        return f"{many} " + re.sub("number|section", r"\g<0>s", type_of(inner[0]), count=1)
    if _is_section(annotation):
        return "section"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", NoneType: "null", dict: "mapping"}
    forms = {"ge": "from {:,}", "gt": "above {:,}", "le": "to {:,}", "lt": "below {:,}"}
    limits = [form.format(getattr(each, name)) for name, form in forms.items() for each in metadata if hasattr(each, name)]
    return " ".join([names.get(origin or annotation, "text"), *(limits if annotation in (int, float) else [])])


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _is_section(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return any(_is_section(each) for each in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _short_words(schema: type[BaseModel]) -> dict[str, str]:
    """{full key: the last word of it}, where that word finds it."""
    return {keys[0]: word for word, keys in last_words(schema).items() if len(keys) == 1 and word not in schema.model_fields}


def _example(field: FieldInfo) -> Any:
    """The one that is written down; else another of its words; else its default."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if field.examples:
        return field.examples[0]
    words = [each for each in get_args(field.annotation) if get_origin(field.annotation) is Literal and each != default]
    return words[0] if words else not default if isinstance(default, bool) else default


def _yaml(value: Any) -> str:
    """In one line, as on a command line."""
    plain = json.loads(json.dumps(value, default=str))
    return str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).removesuffix("\n").removesuffix("\n...")


def json_schema(schema: type[BaseModel]) -> str:
    """For editors, which then complete keys and show what they mean."""
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

    class WithMeanings(GenerateJsonSchema):
        def model_schema(self, schema: Any) -> JsonSchemaValue:
            made = super().model_schema(schema)
            for name, text in docstrings(schema["cls"]).items():
                made.get("properties", {}).get(name, {})["description"] = text
            return made

    return json.dumps(schema.model_json_schema(schema_generator=WithMeanings), indent=1) + "\n"


# ---- the verb ---------------------------------------------------------------------------------------------------------


def _explain(verbs: dict[str, Parser], options: argparse.Namespace) -> int:
    verb, key = verbs[options.verb], options.key
    schema = schema_of(verb)
    if options.json_schema:
        if schema is None:
            raise SettingsError(f"--json-schema: {options.verb} has no settings; see {verb.prog} --help")
        print(json_schema(schema), end="")
        return 0
    chosen = known = [*options_of(verb), *settings_of(verb)]
    if key is not None:
        chosen = [each for each in known if key in (each.key, *(word.lstrip("-") for word in each.key.split(", ")))]
        chosen = chosen or [each for each in known if each.key.startswith(f"{key}.")]
        chosen = chosen or [each for each in known if each.key.endswith(f".{key}")]
        if not chosen:
            words = {word for each in known for word in re.split(r"\.|, ", each.key) + [each.key]}
            raise SettingsError(f"{key}: unknown to {options.verb}; {nearest(key, sorted(words))}")
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
