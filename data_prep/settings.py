"""Strict settings: a YAML file and `key.path=value` overrides become a frozen pydantic model, or
one `SettingsError`.

Every command line of the project reads its configuration through `load_settings`. The error names
each wrong field, its value and the fix (with the nearest valid name). A bad config must fail well
within a second, so this module has no slow imports.

This file is long because reading, overriding and explaining a config share the traversal of its
sections.

YAML is read as YAML 1.2 in the cases in which PyYAML's 1.1 surprises: `1e-3` and `010` are decimal
numbers, `off` and `1:30` are words.
"""

import copy
import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from data_prep.errors import Code, SettingsError, UserError, readable


class Settings(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are frozen, types are
    strict."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )
    short_words: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Shorthands on the command line: word -> (field, format of its value), for example epochs ->
    (train.duration, "{} epochs")."""
    of_verb: ClassVar[str] = ""
    """Command that reads this config."""
    example_with: ClassVar[Mapping[str, str | None]] = {}
    """Setting or section -> words (other settings) that its example also needs. {} is replaced by
    this section's prefix. None: the command does not support the setting, and `explain` omits
    it."""
    removed: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions, which are ignored if they have these values."""


S = TypeVar("S", bound=Settings)


def load_settings(schema: type[S], *, path: str | Path | None, overrides: list[str]) -> S:
    """Return the validated settings of `path` (or the defaults) after `overrides`, applied in
    order."""
    tree = read_yaml(Path(path)) if path is not None else {}
    keys = frozenset(tree)
    try:
        for override in overrides:
            apply_override(tree, override, schema=schema)
        return validate(schema, tree)
    except SettingsError:
        refuse_of_another_verb(schema, keys, path)
        raise


_SIGNS: tuple[tuple[set[str], str], ...] = (
    *(
        ({section}, "cluster/submit")
        for section in ("prepare", "pretrain", "probe", "finetune", "knn", "evaluate", "export")
    ),
    ({"source"}, "data_prep build"),
    ({"splits"}, "data_prep index"),
    ({"model", "train"}, "pretrain train"),
    ({"pretrained", "train"}, "finetune tune"),
    ({"pretrained", "neighbors"}, "finetune knn"),
    ({"pretrained", "lrs"}, "finetune probe"),
    ({"pretrained", "out"}, "finetune export"),
    ({"pretrained"}, "finetune probe, finetune knn, finetune evaluate"),
)
"""Keys that identify the command of a config; the first matching row counts."""


def verbs_of(keys: Set[str]) -> tuple[str, ...]:
    """Return the commands whose configs have these top-level keys; () if unknown."""
    return next((tuple(verbs.split(", ")) for signs, verbs in _SIGNS if signs <= keys), ())


def refuse_of_another_verb(schema: type[Settings], keys: Set[str], path: str | Path | None) -> None:
    """Raise SettingsError if the config belongs to another command. `keys`: top-level keys of the
    file."""
    verbs = verbs_of(keys)
    if verbs and schema.of_verb not in ("", *verbs):
        raise SettingsError(
            str(path),
            f"it is a config of {' or '.join(verbs)}, not of {schema.of_verb}",
            f"run {verbs[0]} {path}",
            code="wrong-command",
        )


def validate(schema: type[S], tree: dict[str, Any]) -> S:
    tree = without_removed(schema, tree)
    try:
        # JSON, because pydantic's strict mode then takes lists for tuples and ints for floats, but
        # never "3" for 3. Values that JSON does not have, such as dates, fail as text.
        return schema.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise _explain(schema, error.errors(include_url=False)) from None


def without_removed(schema: type[Settings], tree: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for key, value in schema.removed.items():
        section, _, name = key.rpartition(".")
        own = tree.get(section) if section else tree
        if isinstance(own, dict) and own.get(name) == value:
            del own[name]
    return tree


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


NumWorkers = Annotated[int, Field(ge=0), AfterValidator(lambda value: value or num_cores())]


def read_lines(field: str, file: str, *, spelled: bool = False) -> list[str]:
    """Return the lines of the text file that a setting names, without blank lines. `spelled`:
    replace each byte that is not UTF-8 by an escape, as in class names of a manifest."""
    try:
        data = Path(file).read_bytes()
        errors = "backslashreplace" if spelled and b"\0" not in data else "strict"
        lines = data.decode("utf-8-sig", errors).splitlines()  # -sig: drop a byte order mark
    except OSError as error:
        code: Code = "missing-path" if isinstance(error, FileNotFoundError) else "unreadable"
        problem, fix = f"{file} cannot be read ({error.strerror})", "choose a readable text file"
        raise SettingsError(field, problem, fix, code=code) from None
    except UnicodeDecodeError as error:
        problem, fix = f"{file} cannot be read ({error})", "save it as UTF-8"
        raise SettingsError(field, problem, fix, code="unreadable") from None
    return [line.strip() for line in lines if line.strip()]


def read_yaml(path: Path) -> dict[str, Any]:
    code: Code = "unreadable"
    problem, fix = "it is not a readable text file", "choose a YAML file"
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        code, problem = "missing-path", "this config file does not exist"
        fix = near_path(path) or fix
        if "=" in str(path):
            fix = "write the config file before every key=value"
    except IsADirectoryError:
        problem = "it is a directory"
        if (path / "manifest.json").is_file():
            fix = f"for a dataset, write a config first: pretrain recommend {path}"
        if (path / "config.yaml").is_file():
            fix = f"the config of this run is {path / 'config.yaml'}"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{problem} ({error})"
    raise SettingsError(str(path), problem, fix, code=code)


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    fix = "correct the file"
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        for mark in (getattr(error, name, None) for name in ("context_mark", "problem_mark")):
            if mark is not None and without_commands(text) != text:
                mark.buffer = None  # do not quote lines that may contain a command
        problem = f"it is not valid YAML ({' '.join(str(error).split())})"
        raise SettingsError(str(path), problem, fix, code="bad-syntax") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        problem = (
            f"a config is a mapping of sections, but this file contains a {type(tree).__name__}"
        )
        raise SettingsError(str(path), problem, fix, code="bad-syntax")
    return tree


def without_commands(text: str) -> str:
    """Return the text up to the first stream command (pipe:), which may contain secrets."""
    return re.sub(r"pipe:.*", "pipe:...", text, flags=re.DOTALL | re.IGNORECASE)


def apply_override(
    tree: dict[str, Any], override: str, *, schema: type[BaseModel] | None = None
) -> None:
    """Set one `key.path=value` in `tree`. The value is read as YAML. The last word of a key is
    sufficient if there is a `schema`."""
    dotted, equals, text = override.partition("=")
    public = without_commands(override)
    keys = dotted.strip().split(".")
    if not equals or not all(keys) or "=" not in public:
        fields = schema.model_fields.items() if schema is not None else ()
        example = next(
            (f"{name}={each.examples[0]}" for name, each in fields if each.examples),
            "optimizer.lr=1e-4",
        )
        fix = f"write a setting as key.path=value, such as {example}, in quotes if it has spaces"
        raise SettingsError(public, "it is not a setting", fix, code="bad-syntax")
    if schema is not None and len(keys) == 1:
        meant = words_of(schema).get(keys[0], {})
        if len(meant) > 1:
            fix = f"write {' or '.join(f'{key}={text}' for key in meant)}"
            raise SettingsError(keys[0], "several settings have this name", fix, code="unknown-key")
        for key, form in meant.items():
            keys, text = key.split("."), form.format(text)
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            section = ".".join(keys[: depth + 1])
            problem = f"{section} is the value {without_commands(repr(child))}, not a section"
            fix = f"replace all of it by '{section}={{{keys[depth + 1]}: VALUE, ...}}'"
            raise SettingsError(dotted, problem, fix, code="bad-value")
        node = child
    try:
        node[keys[-1]] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        is_secret = "storage" in override or public != override
        problem = f"{'its value' if is_secret else repr(text)} is not valid YAML"
        raise SettingsError(dotted, problem, "quote the value", code="bad-syntax") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: the nearest known name, or all of them."""
    names, low = {name.lower(): name for name in known}, word.lower()
    near = [name for name in names if low and name.startswith(low)] or difflib.get_close_matches(
        low, names, n=1, cutoff=0.6
    )
    if near:
        return f"did you mean {names[near[0]]!r}?"
    return f"choose one of {', '.join(sorted(names.values()))}"


def near_path(path: Path, *, of: str = "") -> str:
    """Return "did you mean" with the most similar name next to a missing path, or "". `of`:
    consider only folders that contain this file."""
    names = sorted(
        each.name for each in path.parent.glob("*") if not of or Path(f"{each}{of}").exists()
    )
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def dump(settings: Settings) -> str:
    """Return the resolved settings as YAML, which `load_settings` reads back to an equal value."""
    return str(
        yaml.dump(settings.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=120)
    )


def in_yaml(value: Any) -> str:
    """Return the value as one line of YAML, as on the command line."""
    plain = json.loads(json.dumps(value, default=str))
    text = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


def example_of(field: FieldInfo) -> Any:
    """Return an example that is not the default: declared, or a valid word. Else return the
    default."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    words = (
        get_args(field.annotation)
        if get_origin(field.annotation) is Literal
        else (True, False)
        if isinstance(default, bool)
        else ()
    )
    return next((each for each in (*(field.examples or ()), *words) if each != default), default)


NUM_NAMED = 5
"""Largest number of settings that `differences` lists."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}, for example to log a config as parameters."""
    if isinstance(tree, dict):
        return {
            key: value
            for name, inner in tree.items()
            for key, value in flatten(inner, f"{prefix}{name}.").items()
        }
    return {prefix.rstrip("."): tree}


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    is_free: Callable[[str, Any, Any], bool] = lambda key, old, new: False,
) -> str:
    """Return the settings in which two configs differ, with both values; "" for none. `is_free`:
    True for differences to ignore."""
    before, now = flatten(dict(old)), flatten(dict(new))
    pairs = [(key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    changes = [
        f"{key}: {_short(str(b))}, was {_short(str(a))}"
        for key, a, b in pairs
        if a != b and not is_free(key, a, b)
    ]
    more = [f"and {len(changes) - NUM_NAMED} more"] if len(changes) > NUM_NAMED else []
    return "; ".join([*changes[:NUM_NAMED], *more])


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---- names

_LIKE_AN_ESCAPE = re.compile(r"\\(?=x[0-9a-f]{2})")


def printable(name: str) -> str:
    """Return the name as valid UTF-8, for records, lists and class names. A byte that is not UTF-8
    becomes an escape such as \\xe9, and a backslash that looks like an escape becomes \\x5c.
    Different names therefore stay different, and each can be recovered."""
    return readable(_LIKE_AN_ESCAPE.sub(r"\\x5c", name))


# ---- errors of pydantic

_FIXES = {
    **dict.fromkeys(("int_type", "int_from_float"), "give a whole number"),
    "float_type": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "string_type": "give text (in quotes if it looks like a number)",
    "string_pattern_mismatch": "give text that matches {pattern}",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "give a section (key: value lines)"
    ),
    "greater_than": "give a number above {gt:g}",
    "greater_than_equal": "give a number of at least {ge:g}",
    "less_than": "give a number below {lt:g}",
    "less_than_equal": "give a number of at most {le:g}",
    "too_short": "give at least {min_length} entries",
    "too_long": "give at most {max_length} entries",
}
"""Fix for each type of pydantic error; {names} are from the error's context."""


def _explain(schema: type[BaseModel], problems: Sequence[Any]) -> SettingsError:
    inside = {each["loc"][:-1] for each in problems}
    first, *others = {
        str(error): error
        for problem in problems
        # pydantic also calls a list with a wrong entry too short
        if problem["type"] != "too_short" or problem["loc"] not in inside
        for error in _errors_of(schema, problem)
    }.values()
    return SettingsError(first.field, first.problem, first.fix, code=first.code, others=others)


def _errors_of(schema: type[BaseModel], problem: Any) -> Iterator[UserError]:
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    keys, models = _locate(schema, problem["loc"])
    field = ".".join(keys) or "config"
    parent = problem["loc"]
    while parent and isinstance(parent[-1], int):  # entries of a list
        parent = parent[:-1]
    siblings = {
        name: each
        for model in _locate(schema, parent[:-1])[1]
        for name, each in model.model_fields.items()
    }
    setting = siblings.get(str(parent[-1])) if parent else None
    if kind == "value_error":
        yield from _of_validator(context["error"], ".".join(keys))
    elif kind == "extra_forbidden":
        fix = _fix_of_unknown_key(keys, siblings, schema)
        yield SettingsError(field, "unknown key", fix, code="unknown-key")
    elif kind in ("missing", "union_tag_not_found"):
        required = [
            name
            for model in models
            for name, each in model.model_fields.items()
            if each.is_required()
        ]
        field = ".".join([field, *required[:1]])  # of a missing section, name one setting
        fix = f"set it in the config or as {field}=VALUE"
        yield SettingsError(field, "it is required", fix, code="missing-value")
    elif kind == "union_tag_invalid":
        fix = nearest(context["tag"], [str(tag_of(model)) for model in models])
        yield _not_valid(f"{field}.kind", context["tag"], fix)
    elif kind == "literal_error":
        words = map(str, _words_in(setting.annotation)) if setting else ()
        yield _not_valid(field, value, nearest(str(value), words))
    else:
        fix = _FIXES.get(kind, "").format_map(context) or problem["msg"]
        if kind == "tuple_type":
            fix = f"give a list, such as {in_yaml(example_of(setting) if setting else [])}"
        if kind == "dict_type" and keys[-1].endswith("storage"):  # the value may be a secret
            yield SettingsError(field, "its value is not valid", fix, code="bad-value")
        else:
            yield _not_valid(field, value, fix)


def _not_valid(field: str, value: object, fix: str) -> SettingsError:
    text = "null" if value is None else _short(without_commands(repr(value)), 60)
    return SettingsError(field, f"{text} is not valid", fix, code="bad-value")


def _of_validator(error: ValueError, prefix: str) -> Iterator[UserError]:
    """Yield the UserErrors of a section's validators. Their fields are relative to the section."""
    if not isinstance(error, UserError):
        error = SettingsError("", str(error), code="bad-value")
    for each in (error, *error.others):
        field = each.field
        if not field or f".{prefix}".endswith(f".{field}"):
            field = prefix
        elif prefix and not f"{field}.".startswith(f"{prefix}.") and "/" not in field:
            field = f"{prefix}.{field}"
        yield SettingsError(field or "config", each.problem, each.fix, code=each.code)


def _words_in(annotation: Any) -> list[object]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for inner in get_args(annotation) for word in _words_in(inner)]


ALIASES = {
    "learning_rate": ("lr", "lrs"),
    "batch_size": ("global_batch_size", "local_batch_size", "feature_batch_size"),
}
"""Names in other libraries -> our settings."""


def _fix_of_unknown_key(keys: list[str], siblings: Collection[str], schema: type[BaseModel]) -> str:
    """Return a fix for an unknown key: similar keys in the same section, or else anywhere in the
    config."""
    word, leaves = keys[-1].lower(), words_of(schema)
    aliases = ALIASES.get(word, ())
    if near := [".".join([*keys[:-1], name]) for name in aliases if name in siblings]:
        return f"did you mean {' or '.join(map(repr, near))}?"
    names: Iterable[str] = [name for name in aliases if name in {*schema.model_fields, *leaves}]
    if not names and len(keys) == 1:
        plural = [leaf for leaf in leaves if leaf == f"{word}s"]
        longer = [leaf for leaf in leaves if f"_{word}_" in f"_{leaf}_" and word not in leaves]
        names = plural or longer or difflib.get_close_matches(word, [*siblings, *leaves], 1, 0.75)
        names = [name for name in names if name not in siblings]
    meant = [
        key if form == "{}" else name
        for name in names
        for key, form in (leaves.get(name) or {name: "{}"}).items()
    ]
    if 1 <= len(meant) <= 3:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    return nearest(keys[-1], siblings)


def _locate(
    schema: type[BaseModel], location: tuple[Any, ...]
) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys on the way to `location`, as the user wrote them (without pydantic's tags for
    unions), and the section classes at its end."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [schema]
    for part in location:
        if isinstance(part, int):
            keys.append(str(part))  # position in a list; all entries have the same classes
            continue
        tagged = [model for model in models if len(models) > 1 and tag_of(model) == part]
        if tagged:
            models = tagged
            continue
        keys.append(str(part))
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [inner for field in fields for inner in models_of(field.annotation)]
    return keys, models


def tag_of(model: type[BaseModel]) -> object:
    return (
        next(iter(get_args(model.model_fields["kind"].annotation)), None)
        if "kind" in model.model_fields
        else None
    )


def sections_of(
    schema: type[BaseModel], prefix: str = "", *, in_lists: bool = False
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the schema and every section in it, each with the prefix of its keys (N for a position
    in a list). A union yields all its kinds, including kinds that only a validator accepts."""
    yield prefix, schema
    for name, field in schema.model_fields.items():
        accepted = [
            each.json_schema_input_type
            for each in field.metadata
            if isinstance(each, BeforeValidator)
        ]
        alone = [
            model
            for each in (*accepted, field.annotation)
            for model in models_of(each, in_lists=False)
        ]
        listed = models_of(field.annotation) if in_lists and not alone else []
        for section in dict.fromkeys([*alone, *listed]):
            yield from sections_of(
                section, f"{prefix}{name}.{'N.' if listed else ''}", in_lists=in_lists
            )


def words_of(schema: type[BaseModel]) -> dict[str, dict[str, str]]:
    """Return {word: {key: format of the value}} for the command line: last words of keys, and
    shorthands. Top-level settings are not included."""
    long, short = dict[str, dict[str, str]](), dict[str, dict[str, str]]()
    for prefix, section in sections_of(schema):
        for name in section.model_fields if prefix else ():
            long.setdefault(name, {})[prefix + name] = "{}"
        short |= {
            word: {prefix + name: form}
            for word, (name, form) in getattr(section, "short_words", {}).items()
        }
    return {word: keys for word, keys in (short | long).items() if word not in schema.model_fields}


def models_of(annotation: Any, *, in_lists: bool = True) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, *((tuple,) if in_lists else ())):
        return [
            model
            for argument in get_args(annotation)
            for model in models_of(argument, in_lists=in_lists)
        ]
    return []


# ---- YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML loader with numbers and booleans of YAML 1.2. Repeated keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text", problem_mark=node.start_mark
                )
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} occurs twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


_NUMBER = re.compile(
    r"^[-+]?(\d[\d_]*\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?)$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_WHOLE = re.compile(r"^([-+]?\d[\d_]*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_BOOL, _INT, _FLOAT, _TEXT, _TIME = (
    f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "str", "timestamp")
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rules if tag not in (_BOOL, _INT, _FLOAT, _TIME)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
_Loader.add_constructor(
    _INT,
    lambda _, node: int(node.value.replace("_", ""), 0 if node.value[:2] in ("0o", "0x") else 10),
)
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(  # the shell does not expand key=~/x
    _TEXT,
    lambda _, node: (
        str(Path(node.value).expanduser()) if node.value.startswith("~/") else node.value
    ),
)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes only values that `_Loader` would misread."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(
    float, lambda dumper, value: dumper.represent_scalar(_FLOAT, repr(value))
)  # 1e-05, not 1.0e-05
