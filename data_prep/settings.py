"""Strict settings: YAML file + `key.path=value` overrides -> a frozen pydantic model, or one clear
message.

Every command line of the project reads its configuration through `load_settings`. A mistake of the
user becomes a `SettingsError` whose lines each name the field, the value and the remedy (with the
nearest valid name). Nothing heavy is imported here: a bad config must cost well under a second.

Long because every message about a setting is made here, with its remedy.

YAML here is YAML 1.2 where PyYAML's 1.1 surprises: `1e-3` and `010` are decimal numbers, `off` and
`1:30` are words.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from data_prep.errors import SettingsError, readable


class Settings(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are frozen, types are
    strict."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )
    short_words: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Words of the command line that stand for a setting of this section: word -> (field, form of
    the value)."""
    of_verb: ClassVar[str] = ""
    """The command whose config this is."""
    example_with: ClassVar[Mapping[str, str | None]] = {}
    """Words that the example of a setting (or of all settings in a section) needs next to it, with
    {} for this section's prefix. None: the command does not support the setting, and `explain` does
    not list it."""


S = TypeVar("S", bound=Settings)


def load_settings(schema: type[S], *, path: str | Path | None, overrides: list[str]) -> S:
    """The validated settings of `path` (or of the defaults) with `overrides` applied in order."""
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
    ({"source"}, "data_prep build"),
    ({"splits"}, "data_prep index"),
    *(
        ({section}, "cluster/submit")
        for section in ("prepare", "pretrain", "probe", "finetune", "knn", "evaluate", "export")
    ),
    ({"model", "train"}, "pretrain train"),
    ({"pretrained", "train"}, "finetune tune"),
    ({"pretrained", "neighbours"}, "finetune knn"),
    ({"pretrained", "lrs"}, "finetune probe"),
    ({"pretrained", "out"}, "finetune export"),
    ({"pretrained"}, "finetune probe, finetune knn, finetune evaluate"),
)
"""Keys by which one sees what a config is for; the first row that fits."""


def verbs_of(keys: Set[str]) -> tuple[str, ...]:
    """What a config with such keys at its top is for; () where they do not tell."""
    return next((tuple(verbs.split(", ")) for signs, verbs in _SIGNS if signs <= keys), ())


def refuse_of_another_verb(schema: type[Settings], keys: Set[str], path: str | Path | None) -> None:
    """One line in the place of as many as the config has keys. `keys`: at the top of the file."""
    verbs = verbs_of(keys)
    if verbs and schema.of_verb not in ("", *verbs):
        mine, theirs = schema.of_verb, " or ".join(verbs)
        raise SettingsError(
            f"{path}: this is a config of {theirs}, not of {mine}; run {verbs[0]} {path}"
        )


def validate(schema: type[S], tree: dict[str, Any]) -> S:
    try:
        # Through JSON: there pydantic's strict mode takes lists for tuples and ints for floats, but
        # never "3" for 3. What is not plain, such as YAML's dates, reaches the schema as text and
        # fails there by field.
        return schema.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        within = {
            problem["loc"][:-1] for problem in problems
        }  # a list is not too short as well because an entry is wrong
        lines = [
            _explain(schema, each)
            for each in problems
            if each["type"] != "too_short" or each["loc"] not in within
        ]
        raise SettingsError("\n".join(dict.fromkeys(lines))) from None


def num_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))


NumWorkers = Annotated[int, Field(ge=0), AfterValidator(lambda value: value or num_cores())]
"""Worker processes; 0 means one per core."""


def read_lines(field: str, file: str, *, spelled: bool = False) -> list[str]:
    """The lines of the text file that a setting names, without the blank ones. With `spelled`, a
    byte that is not UTF-8 stands as \\xe9, as in the classes of a manifest, which such lines are
    compared with."""
    try:
        data = Path(file).read_bytes()
        # Windows begins text files with a mark
        lines = data.decode(
            "utf-8-sig", "backslashreplace" if spelled and b"\0" not in data else "strict"
        ).splitlines()
    except OSError as error:
        raise SettingsError(f"{field}: {file} cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{field}: {file} cannot be read ({error}); write it as UTF-8"
        ) from None
    return [line.strip() for line in lines if line.strip()]


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if "=" in str(path):
            raise SettingsError(
                f"{path}: is no config file, which comes before every key=value; name it"
            ) from None
        raise SettingsError(
            f"{path}: no such config file; {near_path(path) or 'name a YAML file'}"
        ) from None
    except IsADirectoryError:
        own = path / "config.yaml"
        hint = f"that of this run is {own}" if own.is_file() else "name a YAML file"
        raise SettingsError(f"{path}: is a directory, no config file; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path}: cannot be read as a text file ({error}); name a YAML file"
        ) from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        for mark in (getattr(error, name, None) for name in ("context_mark", "problem_mark")):
            if mark is not None and without_commands(text) != text:
                mark.buffer = None  # the lines around it may be of a command
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise SettingsError(
            f"{path}: a config is a mapping of sections, but this is a {type(tree).__name__}"
        )
    return tree


def without_commands(text: str) -> str:
    """Return the text as far as the first command of a stream, which may hold secrets."""
    return re.sub(r"pipe:.*", "pipe:...", text, flags=re.DOTALL | re.IGNORECASE)


def apply_override(
    tree: dict[str, Any], override: str, *, schema: type[BaseModel] | None = None
) -> None:
    """Sets one `key.path=value` in `tree`; the value is read as YAML. With a `schema`, the last
    word of a key is enough."""
    dotted, equals, text = override.partition("=")
    known = without_commands(override)
    keys = dotted.strip().split(".")
    if not equals or not all(keys) or known.find("=") < 0:
        fields = schema.model_fields.items() if schema is not None else ()
        example = next(
            (f"{name}={each.examples[0]}" for name, each in fields if each.examples),
            "optimizer.lr=1e-4",
        )
        raise SettingsError(
            f"override {known!r}: write it as key.path=value, such as {example}, and in quotes if"
            " it has spaces"
        )
    if schema is not None and len(keys) == 1:
        meant = words_of(schema).get(keys[0], {})
        if len(meant) > 1:
            raise SettingsError(
                f"{keys[0]}: there are several; write"
                f" {' or '.join(f'{key}={text}' for key in meant)}"
            )
        for key, form in meant.items():
            keys, text = key.split("."), form.format(text)
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(
                f"override {known!r}: {'.'.join(keys[: depth + 1])} is the value"
                f" {without_commands(repr(child))}, not a section"
            )
        node = child
    try:
        node[keys[-1]] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        is_secret = "storage" in override or known != override
        what = (
            f"override {dotted}: what follows" if is_secret else f"override {override!r}: {text!r}"
        )
        raise SettingsError(f"{what} is not valid YAML; quote it") from None


def nearest(word: str, known: list[str]) -> str:
    """What to say about an unknown name: the nearest known one, or all of them."""
    names, low = {name.lower(): name for name in known}, word.lower()
    near = [name for name in names if low and name.startswith(low)] or difflib.get_close_matches(
        low, names, n=1, cutoff=0.6
    )
    return f"did you mean {names[near[0]]!r}?" if near else f"known: {', '.join(sorted(known))}"


def near_path(path: Path, *, of: str = "") -> str:
    """Of a path that is not there: the one beside it that is named alike (and holds `of`), as a
    question."""
    names = sorted(
        each.name for each in path.parent.glob("*") if not of or Path(f"{each}{of}").exists()
    )
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def dump(settings: Settings) -> str:
    """The resolved settings as YAML that `load_settings` reads back to an equal value."""
    return str(
        yaml.dump(settings.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=120)
    )


def in_yaml(value: Any) -> str:
    """In one line, as people write it on a command line, and read back as the same value."""
    plain = json.loads(json.dumps(value, default=str))
    text = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


def example_of(field: FieldInfo) -> Any:
    """The one that is written down; else another of its words; else its default."""
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
"""Of settings that differ."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value}: how a config is logged as parameters."""
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
    """The settings in which two configs differ, with both values; "" for none. `is_free`: whether a
    change does not count."""
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
# --------------------------------------------------------------------------------------------------

_LIKE_AN_ESCAPE = re.compile(r"\\(?=x[0-9a-f]{2})")


def printable(name: str) -> str:
    """The one spelling of a name in records, lists and class names, where all is UTF-8: any other
    byte stands as \\xe9, a backslash that would look like that as \\x5c, so that no two names are
    spelled alike and each can be had back; the rest stays as it is.
    """
    return readable(_LIKE_AN_ESCAPE.sub(r"\\x5c", name))


# ---- messages
# --------------------------------------------------------------------------------------------------

_PLAIN = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number is needed"),
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed (quote it if it looks like a number)",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "a section (key: value lines) is needed",
    ),
}


def _explain(schema: type[BaseModel], problem: Any) -> str:
    """One line: field, value, remedy."""
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if without_commands(str(value)) != str(value):
        value = without_commands(str(value))
    location, models = _locate(schema, problem["loc"])
    needed = [
        name for model in models for name, each in model.model_fields.items() if each.is_required()
    ]
    beside = {
        name: each
        for model in _locate(schema, problem["loc"][:-1])[1]
        for name, each in model.model_fields.items()
    }
    field = ".".join(location) or "config"
    if kind == "extra_forbidden":
        if alias := _alias(location, beside, schema):
            return f"{field}: unknown key; did you mean {alias}?"
        word, leaves = location[-1].lower(), words_of(schema) if len(location) == 1 else {}
        best = difflib.get_close_matches(word, [*beside, *leaves], n=1, cutoff=0.75)
        many = [leaf for leaf in leaves if leaf == f"{word}s"]
        parts = many or [
            leaf for leaf in leaves if f"_{word}_" in f"_{leaf}_" and word not in leaves
        ]
        found = [leaf for leaf in parts or best if leaf in leaves and leaf not in beside]
        meant = [
            key if form == "{}" else leaf for leaf in found for key, form in leaves[leaf].items()
        ]
        if 1 <= len(meant) <= 3:
            return f"{field}: unknown key; did you mean {' or '.join(map(repr, meant))}?"
        return f"{field}: unknown key; {nearest(location[-1], list(beside))}"
    if kind == "missing":
        field = ".".join([field, *needed[:1]])  # of a section that is not there at all
        return f"{field}: missing; set it in the config or as {field}=VALUE"
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        return (
            f"{field}: {value!r} is not one of its values;"
            f" {nearest(str(value), [word or number for word, number in words])}"
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        words = re.findall(r"'([^']*)'", context.get("expected_tags", ""))
        tag = str(context.get("tag", ""))
        hint = nearest(tag, words) if words else "set its kind"
        return (
            f"{field}.kind: {tag!r} is not one of its values; {hint}"
            if tag
            else f"{field}.kind: missing; set it"
        )
    if kind == "value_error":
        message = str(context["error"])
        return (
            message if message.startswith(field) else f"{field}: {message}" if location else message
        )
    if kind in ("too_short", "too_long"):
        return (
            f"{field}: {value!r} has the wrong number of entries;"
            f" {problem['msg'][0].lower()}{problem['msg'][1:]}"
        )
    needed += [
        name
        for model in models
        for name, each in model.model_fields.items()
        if value in get_args(each.annotation)
    ]
    if (
        kind.startswith("model_")
        and isinstance(value, str)
        and problem["loc"][-1] in beside
        and len(models) == 1
        and needed
    ):
        return (
            f"{field}: {value!r} will not do, for it is a section; write"
            f" {field}.{needed[0]}={value}"
        )
    if kind == "tuple_type":
        such_as = (
            f", such as {in_yaml(example_of(beside[location[-1]]))}"
            if location[-1] in beside
            else ""
        )
        problem["msg"] = f"a list is needed{such_as}"
    if kind == "dict_type" and location[-1].endswith("storage"):  # it may be a secret
        return f"{field}: will not do; {_PLAIN[kind]}"
    reason = _PLAIN.get(kind) or re.sub("^(Input|String) should", "it must", problem["msg"])
    return f"{field}: {'null' if value is None else _short(repr(value), 60)} will not do; {reason}"


ALIASES = {
    "learning_rate": ("lr", "lrs"),
    "batch_size": ("global_batch_size", "local_batch_size", "feature_batch_size"),
}
"""Names that other libraries give to settings of ours."""


def _alias(location: list[str], beside: Collection[str], schema: type[BaseModel]) -> str:
    """Quoted keys that an unknown key of another library means: in the same section, or else
    anywhere in the config."""
    names, leaves = ALIASES.get(location[-1].lower(), ()), words_of(schema)
    found = [".".join([*location[:-1], name]) for name in names if name in beside]
    found = found or [
        key
        for name in names
        for key in ([name] if name in schema.model_fields else leaves.get(name, ()))
    ]
    return " or ".join(map(repr, found))


def _locate(
    schema: type[BaseModel], location: tuple[Any, ...]
) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys that the user wrote on the way to `location` (pydantic adds the tags of unions), and
    what is valid there."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [schema]
    for part in location:
        if isinstance(part, int):
            keys.append(str(part))  # of a list, whose entries are all of one kind
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
    """The schema and every section in it, each with what stands before its keys (in a list N for
    the number); of a union all kinds, and what a validator accepts in their place."""
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
    """{word of the command line: {each key that it may mean: form of the value}}: the last words of
    keys, and what sections have short words for. A setting at the top needs none."""
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
# --------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML with 1.2 numbers and booleans, and with doubled keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text", problem_mark=node.start_mark
                )
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands twice", problem_mark=node.start_mark
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
_Loader.add_constructor(  # the shell leaves key=~/x as it is
    _TEXT,
    lambda _, node: (
        str(Path(node.value).expanduser()) if node.value.startswith("~/") else node.value
    ),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else, and nothing more."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(
    float, lambda dumper, value: dumper.represent_scalar(_FLOAT, repr(value))
)  # 1e-05, not 1.0e-05
