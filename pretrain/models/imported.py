"""A model of the user's own: `model: {import: "my_package.my_module:MyModel"}`. No torch here.

An import runs code, so only the user decides about it:

1. `allow_import` takes the path in the user's config, or after `--allow-import`. Nothing calls it
   with a path from a checkpoint.
2. `check_allowed` fails for a model with any other path. It comes before every import.
3. The module is found on sys.path, then in the current directory.

`code_of` hashes the Python files of the module's top package without running them. Code that the
package imports from elsewhere is not in the hash.
"""

import argparse
import importlib
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_prep.errors import SettingsError
from data_prep.publish import hash_of_json, sha256_of
from data_prep.settings import nearest
from pretrain.models.spec import AnySpec, ImportSpec

_ALLOWED = set[str]()
_FIX = "run the command in the folder that contains it, or install it"


def add_allow_import(verb: argparse.ArgumentParser) -> None:
    words = "run this code if a checkpoint names it as its model (repeat it for several)"
    about: dict[str, Any] = {"type": allow_import, "action": "append", "default": []}
    verb.add_argument("--allow-import", metavar="MODULE:CLASS", help=words, **about)


def allow_import(path: str) -> str:
    """Allow the import of module:Class in this process, and return the path."""
    _ALLOWED.add(path)
    return path


def words_that_allow(spec: AnySpec) -> str:
    """Return the option that a printed command needs; "" for a model of ours."""
    return f" --allow-import {spec.path}" if isinstance(spec, ImportSpec) else ""


def check_allowed(spec: AnySpec, *, source: object = "the checkpoint") -> None:
    """Fail if the model is code that the user has not allowed."""
    if isinstance(spec, ImportSpec) and spec.path not in _ALLOWED:
        problem = f"{source} names {spec.path}, and its code runs only if you name it, too"
        fix = f"if you trust this code, add{words_that_allow(spec)}"
        raise SettingsError("allow_import", problem, fix, code="unsafe")


def code_of(spec: AnySpec) -> str:
    """Return the hash of the Python files of the model's package; "" for a model of ours."""
    if not isinstance(spec, ImportSpec):
        return ""
    package, found = spec.path.partition(":")[0].partition(".")[0], None
    with suppress(ValueError):  # __main__ has no spec
        found = find_spec(package) or PathFinder.find_spec(package, [str(Path.cwd())])
    folders = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    files = {str(file.relative_to(top)): file for top in folders for file in top.rglob("*.py")}
    if found is not None and found.has_location and found.origin and not folders:
        files = {"": Path(found.origin)}
    if not files:
        raise SettingsError("model.import", f"{package} is not found", _FIX, code="unknown-name")
    return hash_of_json({name: sha256_of(file) for name, file in sorted(files.items())})


def import_class(spec: ImportSpec) -> Any:
    """Import the class of an allowed model."""
    check_allowed(spec)
    module_name, _, name = spec.path.partition(":")
    if (place := str(Path.cwd())) not in sys.path:
        sys.path.append(place)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        problem = f"{module_name} cannot be imported ({error})"
        raise SettingsError("model.import", problem, _FIX, code="unknown-name") from error
    if not isinstance(found := getattr(module, name, None), type):
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        fix = nearest(name, classes) if classes else "define it"
        problem = f"{module_name} has no class {name}"
        raise SettingsError("model.import", problem, fix, code="unknown-name")
    return found
