"""Lists of inputs that are not to be used: what `dedup` writes and what `build` and `subset`
honour.

A list is JSON lines; of each line only `path` counts here (where the sample came from, as in a
shard's `.paths`); `dedup` says in further fields why.
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
        """The same for the same set of inputs, in whatever order they were listed; "" for none."""
        return hash_of_json(sorted(self.paths)) if self.paths else ""

    def rows(self, inventory: Inventory) -> NDArray[np.int64]:
        """The rows of the inventory that are excluded; paths that it does not have are of other
        datasets."""
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
    """The union of several lists."""
    paths: set[str] = set()
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"exclude: {file} cannot be read ({error}); name a list that data_prep dedup wrote"
            ) from None
        for number, line in enumerate(lines, start=1):
            try:
                path = json.loads(line)["path"]
            except (ValueError, KeyError, TypeError):
                path = None
            if not isinstance(path, str):
                raise UserError(
                    f'exclude: {file}, line {number}: not of the form {{"path": "..."}}'
                )
            paths.add(path)
    return Exclusions(frozenset(paths))
