"""One shard, read in a worker process: its rows (with labels of its own, until all shards are read), its paths and its record.

A shard's files are published in this order: OUT/PARTS/NAME.npy, OUT/NAME.paths, OUT/PARTS/NAME.json. A record of the same plan and
of the version that stands there now is as good as reading the shard again.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.build.parts import PARTS, read_record, write_record
from data_prep.build.shards import ShardRecord, write_index, write_paths
from data_prep.index.config import IndexSettings
from data_prep.index.places import StockShard, opened, version_of
from data_prep.index.stock import Contents, Rule, read_shard
from data_prep.manifest import INDEX_DTYPE, Shard
from data_prep.publish import sha256_of
from data_prep.settings import Settings, UserError, printable
from data_prep.tar import TarError


class DamagedShard(UserError):  # noqa: N818
    """A tar that is cut or damaged."""


class StockRecord(Settings):
    """What is known of a shard before the classes are: its labels are still numbered as in stock.py."""

    plan_hash: str
    stamp: str | None
    rows_sha256: str
    names: tuple[str, ...]
    has_numbers: bool
    raw_size: int | None
    num_without_key: int
    goes_on_at: int | None
    record: ShardRecord


@dataclass(frozen=True)
class Plan:
    """What a worker needs to know, but for the shard."""

    directory: Path
    settings: IndexSettings
    rule: Rule
    config_hash: str
    hash: str
    """Of the config and of the list of shards."""


def hash_of(shard: StockShard, plan: Plan) -> str:
    with opened(shard, plan.directory, plan.settings) as (path, _):
        return sha256_of(path)


def read_or_known(shard: StockShard, plan: Plan) -> StockRecord:
    return _known(shard, plan) or _read(shard, plan)


def _known(shard: StockShard, plan: Plan) -> StockRecord | None:
    """What an interrupted index has found out about a shard that is still the same."""
    parts = plan.directory / PARTS
    try:
        found = read_record(plan.directory, shard.name, StockRecord)
        whole = (
            sha256_of(parts / f"{shard.name}.npy") == found.rows_sha256
            and sha256_of(plan.directory / found.record.shard.paths_file) == found.record.shard.paths_sha256
        )
    except (OSError, ValueError):
        return None
    if not whole or found.record.shard.name != shard.name or found.plan_hash != plan.hash or found.stamp is None:
        return None
    return found if version_of(shard, plan.settings).stamp == found.stamp else None


def _read(shard: StockShard, plan: Plan) -> StockRecord:
    with opened(shard, plan.directory, plan.settings) as (path, version):
        try:
            contents = read_shard(path, plan.rule, name=shard.title)
        except TarError as error:
            remedy = "" if ";" in str(error) else "; fetch or write it again"
            raise DamagedShard(f"{shard.place}: {error}{remedy}") from None
        num_bytes, sha256 = path.stat().st_size, sha256_of(path)
    rows = np.array([row[1:] for row in contents.rows], INDEX_DTYPE).reshape(-1, 3)
    rows_sha256 = write_index(plan.directory / PARTS, shard.name, rows)
    paths = [f"{shard.title}/{printable(row.key)}" for row in contents.rows]
    found = StockRecord(
        plan_hash=plan.hash,
        stamp=version.stamp,
        rows_sha256=rows_sha256,
        names=tuple(contents.names),
        has_numbers=contents.has_numbers,
        raw_size=contents.raw_size,
        num_without_key=contents.num_without_key,
        goes_on_at=contents.goes_on_at,
        record=_record(
            contents,
            plan_hash=plan.hash,
            shard=Shard(
                name=shard.name,
                file=shard.file,
                num_samples=len(rows),
                num_bytes=num_bytes,
                sha256=sha256,
                index_sha256="",
                paths_sha256=write_paths(plan.directory, shard.name, paths),
            ),
        ),
    )
    write_record(plan.directory, shard.name, found)
    return found


def _record(contents: Contents, *, plan_hash: str, shard: Shard) -> ShardRecord:
    return ShardRecord(
        plan_hash=plan_hash,
        num_inputs=len(contents.rows) + len(contents.rejected),
        shard=shard,
        class_counts={},
        channel_sums=contents.channels.sums,
        channel_square_sums=contents.channels.square_sums,
        num_pixels=contents.channels.num_pixels,
        rejected=tuple(contents.rejected),
    )
