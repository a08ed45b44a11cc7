"""A model of the user's own: `model: {import: "my_package.my_module:MyModel"}`.

`allow_import` is called with a path from the user's config or from `--allow-import`, never with a
path from a checkpoint. Before every import, `check_allowed` raises an error for any other path.
"""

import argparse
import functools
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_prep.errors import SettingsError
from data_prep.publish import hash_of_json, sha256_of
from pretrain.models.spec import AnySpec, ImportSpec

_ALLOWED = set[str | None]()


def add_allow_import(verb: argparse.ArgumentParser) -> None:
    words = "allow a checkpoint to run this code as its model"
    about: dict[str, Any] = {"type": allow_import, "action": "append", "default": []}
    verb.add_argument("--allow-import", metavar="MODULE:CLASS", help=words, **about)


def allow_import(path: str | None) -> str | None:
    _ALLOWED.add(path)
    return path


def check_allowed(spec: AnySpec, *, source: object = "the checkpoint") -> None:
    """Raise SettingsError if the model needs code that the user has not allowed."""
    if isinstance(spec, ImportSpec) and spec.path not in _ALLOWED:
        fix = f"if you trust this code, add --allow-import {spec.path}"
        raise SettingsError(
            "allow_import", f"{source} needs code that is not allowed", fix, code="unsafe"
        )


def code_of(spec: AnySpec) -> str:
    """Return the hash of all Python files in the top-level package of an imported model, without
    running the files. Return "" for other models."""
    if not isinstance(spec, ImportSpec):
        return ""
    return hash_package(spec.path.partition(":")[0].partition(".")[0])


@functools.cache
def hash_package(package: str) -> str:
    found = find_spec(package) or PathFinder.find_spec(package, [str(Path.cwd())])
    places = (found and found.submodule_search_locations) or ()
    files = [(file, place) for place in places for file in sorted(Path(place).rglob("*.py"))]
    if found and found.has_location and not files:
        files = [(Path(str(found.origin)), str(Path(str(found.origin)).parent))]
    if not files:
        raise _not_found(f"{package} is not found")
    hashes = [[str(file.relative_to(place)), sha256_of(file)] for file, place in files]
    return hash_of_json(hashes)


def import_class(spec: ImportSpec) -> Any:
    check_allowed(spec)
    module_name, _, name = spec.path.partition(":")
    if (place := str(Path.cwd())) not in sys.path:
        sys.path.append(place)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise _not_found(f"{spec.path} cannot be imported ({error})") from error


def _not_found(problem: str) -> SettingsError:
    fix = "correct the name, run the command in the folder of the module, or install it"
    return SettingsError("model.import", problem, fix, code="unknown-name")
