"""Lists of inputs to skip: `dedup` writes them, `build` and `subset` read them.

A list has one JSON object per line. Only `path` is used: the source file of the sample, as in a
shard's `.paths`. The other fields give the reason.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.archives.inventory import Inventory
from data_prep.errors import UserError
from data_prep.publish import hash_of_json
from data_prep.settings import printable


@dataclass(frozen=True)
class Exclusions:
    paths: frozenset[str]

    @property
    def digest(self) -> str:
        """Hash of the paths, independent of their order; "" if there are no paths."""
        return hash_of_json(sorted(self.paths)) if self.paths else ""

    def rows(self, inventory: Inventory) -> NDArray[np.int64]:
        """Return the row numbers of excluded inputs. Paths that the inventory does not have are
        ignored: they belong to other datasets."""
        numbers = {
            printable(container.path): number
            for number, container in enumerate(inventory.containers)
        }
        by_container: dict[int, set[str]] = defaultdict(set)
        for path in self.paths:
            cut = path.rfind("/")
            while cut > 0 and path[:cut] not in numbers:
                cut = path.rfind("/", 0, cut)
            container = path[:cut] if cut > 0 else ""
            if container in numbers:
                by_container[numbers[container]].add(path[cut + 1 :] if cut > 0 else path)
        found = [
            row
            for number, names in by_container.items()
            for row in inventory.rows_of_container(number)
            if printable(inventory.name(row)) in names
        ]
        return np.array(sorted(found), np.int64)


def load_exclusions(files: tuple[str, ...]) -> Exclusions:
    paths: set[str] = set()
    for file in files:
        fix = "give a list that data_prep dedup wrote"
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "exclude", f"{file} cannot be read ({error})", fix, code="unreadable"
            ) from None
        for number, line in enumerate(lines, start=1):
            try:
                path = json.loads(line)["path"]
            except (ValueError, KeyError, TypeError):
                path = None
            if not isinstance(path, str):
                raise UserError(
                    "exclude",
                    f'line {number} of {file} is not of the form {{"path": "..."}}',
                    fix,
                    code="bad-syntax",
                )
            paths.add(path)
    return Exclusions(frozenset(paths))
