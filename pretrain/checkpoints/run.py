"""A run directory: what is in it, whose it is, and whether there is anything left to do.

RUN/config.yaml       the resolved settings
RUN/checkpoints/      see checkpoint.py
RUN/tracking/         see tracker.py
RUN/micro_batch.json  see micro_batch.py; only with local_batch_size auto
RUN/logs/             what DeepSpeed and Python warned of, one file per rank
RUN/checked/          see first_read.py
RUN/bad_samples/      see bad_samples.py; only where there are any
RUN/skipped_steps/    see skipped_steps.py; only where there are any
RUN/stacks/           see watchdog.py; only where a run hung, or a rank fell silent
RUN/starts/           see starts.py
RUN/remote/           see remote.py; only with checkpoint.remote
RUN/weights.json      sha256 and step of the weights that it began with, if it began with any
RUN/record.json       task, plan, labels, seed and parents; see pretrain/record.py
RUN/result.json       written last; a run that has it is finished
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import MANIFEST_NAME, load_manifest
from data_prep.publish import withdraw, write_atomic, write_json
from data_prep.settings import (
    S,
    Settings,
    differences,
    dump,
    in_yaml,
    load_settings,
    read_yaml,
    validate,
    verbs_of,
)
from pretrain.checkpoints.hub import is_on_hub
from pretrain.config import DataSettings, TrainingSettings, parse_length
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.starts import hold_run
from pretrain.record import RECORD

RESULT, CONFIG_FILE, WEIGHTS = "result.json", "config.yaml", "weights.json"

MAY_CHANGE = (
    "run_dir",
    "resume",
    "record",
    "seeds",
    "ranks",
    "checkpoint",
    "local_batch_size",
    "feature_batch_size",
    "features_dir",
    "features",
    "cache_gb",
    "chunk_mb",
    "tracking.enabled",
    "tracking.peak_teraflops",
    "tracking.sinks",
    "engine.zero_stage",
    "engine.offload",
    "engine.activation_checkpointing",
    "engine.compile",
    "engine.cuda_graphs",
    "engine.timeout_s",
    "engine.heartbeat_timeout_s",
    "engine.hang_timeout_s",
    "engine.lock_wait_s",
    "data.cache_dir",
    "data.cache_gb",
    "data.check",
    "data.max_bad_share",
    "data.stage_dir",
    "train.duration",
    "train.local_batch_size",
    "train.log_every_steps",
    "train.eval_every",
    "train.loader_threads",
    "train.max_skipped_steps",
    "train.prefetch_batches",
)
"""Settings that may differ when a run goes on: they do not change what is learned (numbers differ
by rounding at most, as they do with another number of ranks or, on CPUs, of threads; see
`num_cpu_threads`). What `train.duration` changes, and what it may not be, is the business of
`check_length`."""
PLACES = ("data.dataset", "data.also")
"""They may, too, as long as the same pictures lie there: a run that was begun on shards behind http
goes on with a copy of them."""


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """True for `step-` plus digits; a copy named step-00000010.bak is the user's own."""
    return re.fullmatch(r"step-[0-9]+", name) is not None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(
        (path for path in checkpoints_dir(run_dir).glob("step-*") if is_checkpoint_name(path.name)),
        key=step_of,
    )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def stored_config(schema: type[Settings], path: str) -> Path | None:
    """Return the settings that a run directory was begun with; None if `path` is no run of the
    schema's command."""
    stored = Path(path) / CONFIG_FILE
    return (
        stored
        if stored.is_file() and schema.of_verb in verbs_of(read_yaml(stored).keys())
        else None
    )


def load_run_settings(schema: type[S], *, path: str, overrides: list[str]) -> S:
    """Load a config, or for a run directory the settings that the run was begun with. `overrides`
    come after either."""
    if stored := stored_config(schema, path):
        path, overrides = str(stored), [f"run_dir={in_yaml(str(Path(path)))}", *overrides]
    return load_settings(schema, path=path, overrides=overrides)


def run_and_length(place: str) -> tuple[str, str]:
    """(RUN, 50epochs) of RUN@50epochs; any other place as it is, and nothing (on the hub @ is
    followed by a revision)."""
    name, at, words = place.rpartition("@")
    return (
        (name, words)
        if at and not is_on_hub(place) and "/" not in words and not Path(place).exists()
        else (place, "")
    )


def checkpoint_at(place: str) -> Path | None:
    """Of RUN@50epochs or RUN@1200steps the checkpoint of that step, as RUN's own batch and data
    count it; None of any other place. An error where RUN has not kept it."""
    name, words = run_and_length(place)
    if not words or not (Path(name) / CONFIG_FILE).is_file():
        return None
    length = parse_length(words)
    if length.unit == "steps":
        step = int(length.amount)
    else:
        begun = read_yaml(Path(name) / CONFIG_FILE)
        data = load_training_data(validate(DataSettings, begun["data"]))
        step = data.steps(words, global_batch_size=begun["train"]["global_batch_size"])
    found = checkpoint_dir(Path(name), step)
    if not found.is_dir():
        remote = read_yaml(Path(name) / CONFIG_FILE).get("checkpoint", {}).get("remote")
        copied = (
            f"copy it from {remote}/checkpoints/{found.name} if it is there, " if remote else ""
        )
        kept = ", ".join(f"{step_of(each):,}" for each in list_checkpoints(Path(name))) or "none"
        remedy = f"{copied}or add {words!r} to its checkpoint.keep_at before it gets there"
        raise SettingsError(
            f"{place}: {name} has no checkpoint of step {step:,} (it has: {kept}); name one of"
            f" them, {remedy}"
        )
    return found


def _read_record(path: Path, *, fix: str) -> dict[str, Any]:
    """Return the JSON object that a run has written. A damaged file is an error that names the file
    and the fix."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:  # an OSError says nothing of the content
        raise SettingsError(
            f"{path}: is damaged ({str(error).partition(': ')[0]}). {fix}"
        ) from None
    if not isinstance(record, dict):
        raise SettingsError(f"{path}: is damaged (no JSON object). {fix}")
    return record


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if config := read_yaml(path):
            return config
        raise SettingsError(f"{path}: is empty")
    except SettingsError as error:
        raise SettingsError(
            f"{error}. Restore it, for example by pretrain show CONFIG > {path}"
        ) from None


def finished_result(run_dir: Path, asked: Settings | None = None) -> dict[str, Any] | None:
    """`asked`: settings as they are now; of a training, one that has ended after another number of
    steps is not finished."""
    asked, path = asked if isinstance(asked, TrainingSettings) else None, run_dir / CONFIG_FILE
    begun = (
        read_yaml(path).get("train") if asked and path.exists() else None
    )  # read first, as `claim` removes the result first
    path = run_dir / RESULT
    fix = "Restore it, or remove it and run the same command again"
    result = _read_record(path, fix=fix) if path.exists() else None
    if (
        result is None
        or asked is None
        or begun is None
        or begun["duration"] == asked.train.duration
    ):
        return result
    with suppress(ValueError):  # the data is gone: nothing shows that the other words mean the same
        ends = {each["step"] for each in result.get("runs", {"": result}).values()}
        return result if ends == {steps_of(asked, load_training_data(asked.data))} else None
    return None


def steps_of(settings: TrainingSettings, data: TrainingData) -> int:
    return data.steps(settings.train.duration, global_batch_size=settings.train.global_batch_size)


def save_result(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    """With the weights that it was made of, as it is then."""
    whole = result | begun_with(run_dir)
    write_json(run_dir / RESULT, whole)
    return whole


def begun_with(run_dir: Path) -> dict[str, Any]:
    """Sha256 and step of the weights; {} where there were none."""
    path = run_dir / WEIGHTS
    fix = "Restore it, or remove it: the run then forgets which weights it began with"
    return _read_record(path, fix=fix) if path.exists() else {}


def is_begun(
    directory: Path,
    wanted: Mapping[str, Any],
    *,
    record: str,
    key: str | None = None,
    what: str = "a run",
    field: str = "run_dir",
    alone: bool = False,
    schema: type[Settings] | None = None,
    is_free: Callable[[str, Any, Any], bool] = lambda key, old, new: False,
) -> bool:
    """Whose directory it is: whether what is `wanted` was begun there. Its `record` (a file of YAML
    or JSON in it, or the value of `key` there) holds what makes two of them the same.

    False: nothing is there yet, or nothing of worth, and something can be put there (`alone`: at
    once and whole, beside nothing else; or bit by bit, but not into the run of another kind). An
    error where something else is, which names what differs; `is_free` says where that is no matter.
    With a `schema`, what was begun before some of today's settings existed had their defaults.
    """
    path, advice = directory / record, f"name another {field}"
    if not alone and (directory / MANIFEST_NAME).exists():
        raise SettingsError(f"{field}: {directory} is a dataset; {advice}")
    is_free_again = not alone and is_worthless(directory)
    if not path.exists():
        if (alone and directory.is_file()) or (
            any(directory.glob("*" if alone else CONFIG_FILE)) and not is_free_again
        ):
            raise SettingsError(f"{field}: {directory} exists and is not {what}; {advice}")
        check_place(directory, field=field)
        return False
    try:
        begun: Any = json.loads(path.read_text()) if path.suffix == ".json" else _read_config(path)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise SettingsError(f"{field}: {path} cannot be read; {advice}") from None
    except SettingsError:
        if is_free_again:
            return False
        raise
    if key is not None:
        begun = begun.get(key) if isinstance(begun, dict) else None
    if schema is not None:
        with suppress(SettingsError):  # the differences will name what is no setting any more
            begun = validate(schema, begun).model_dump(mode="json")
    changes = differences(begun if isinstance(begun, dict) else {}, wanted, is_free=is_free)
    if changes and not is_free_again:
        if schema is not None and issubclass(schema, TrainingSettings):
            advice = f"{schema.of_verb} {directory} resumes it with its own settings, or {advice}"
        raise SettingsError(
            f"{field}: {directory} belongs to {what} with other settings ({changes}); {advice}"
        )
    if not alone and finished_result(directory) is None:
        check_place(directory, field=field)
    return not changes


def is_worthless(run_dir: Path) -> bool:
    """Whether what was begun there, and its repetitions, have ended before a first checkpoint:
    other settings may begin anew."""
    return not any(
        any(run_dir.glob(above + name))
        for name in (RESULT, "checkpoints/*")
        for above in ("", "*/")
    )


def forget(run_dir: Path) -> None:
    """What was begun with other settings: the next run there is one of its own, in MLflow, too."""
    for name in ("tracking", "micro_batch.json", "bad_samples", "skipped_steps", WEIGHTS, RECORD):
        if (run_dir / name).exists():
            withdraw(run_dir / name)


def check_settings(run_dir: Path, settings: Settings) -> bool:
    """Refuses a directory that another config has begun to fill; whether this one has begun it."""
    if (run_dir / CONFIG_FILE).is_file() and not is_worthless(
        run_dir
    ):  # a line in the place of all settings of both
        verbs = verbs_of(_read_config(run_dir / CONFIG_FILE).keys())
        if verbs and settings.of_verb not in ("", *verbs):
            raise SettingsError(
                f"run_dir: {run_dir} is a run of {' or '.join(verbs)}; name another run_dir"
            )
    return is_begun(
        run_dir,
        settings.model_dump(mode="json"),
        record=CONFIG_FILE,
        schema=type(settings),
        is_free=may_change,
    )


def check_branch(source: str, settings: Settings) -> None:
    """Of RUN@LENGTH: a branch differs from its run in what a run may change as it goes on, and in
    its schedule and its records."""
    begun = validate(
        type(settings), read_yaml(Path(run_and_length(source)[0]) / CONFIG_FILE)
    ).model_dump(mode="json")
    own = ("start_from", "schedule", "tracking")
    wanted = settings.model_dump(mode="json")
    changes = differences(
        begun, wanted, is_free=lambda *change: change[0].startswith(own) or may_change(*change)
    )
    if changes:
        remedy = (
            "set them as there, or name the checkpoint's own directory to take its weights alone"
        )
        raise SettingsError(
            f"start_from: {source} goes on as its run does, with other settings ({changes});"
            f" {remedy}"
        )


def may_change(key: str, old: Any, new: Any) -> bool:
    """When a run goes on."""
    if key in PLACES and _is_moved(old, new):
        return True
    return any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)


def _is_moved(old: Any, new: Any) -> bool:
    """Whether two places hold the same pictures, which readers see alike; of `data.also`, pair by
    pair."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(
            a | {"dataset": ""} == b | {"dataset": ""} and _is_moved(a["dataset"], b["dataset"])
            for a, b in zip(old, new, strict=True)
        )
    try:
        one, other = (
            load_manifest(local_copy(str(each), storage=None)).pixels_hash for each in (old, new)
        )
        return one == other
    except (UserError, OSError):  # one of them is gone: nothing shows that they are the same
        return False


def check_place(run_dir: Path, *, field: str = "run_dir", remedy: str = "") -> None:
    """Refuses a place where nothing can be put, before ranks are started."""
    above = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if (
        not above.is_dir()
        or not os.access(above, os.W_OK | os.X_OK)
        or above.is_relative_to("/proc")
    ):
        remedy = remedy or f"name another {field}"
        raise SettingsError(
            f"{field}: {run_dir} cannot be made, for {above} cannot be written to; {remedy}"
        )


@contextmanager
def claim(
    run_dir: Path,
    settings: Settings,
    *,
    is_first: bool,
    ranks: RanksSettings,
    stop: StopFlag | None = None,
    begin: Callable[[], bool] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Holds the run directory while the block runs: its first rank writes there, and nobody else.
    Interrupted where it waits for another start and `stop` is raised. `begin`: in the place of
    `check_settings`, of what has a record of its own; its config.yaml keeps the words that it was
    first begun with, as MLflow does. `weights`: that it begins with, unless it is a training that
    goes on."""
    if not is_first:
        yield
        return
    with hold_run(
        run_dir, lock_wait_s=min(ranks.lock_wait_s, ranks.timeout_s / 2), stop=stop
    ):  # the other ranks wait meanwhile
        goes_on = check_settings(run_dir, settings) if begin is None else begin()
        if not goes_on:
            forget(run_dir)
        if weights and not (
            isinstance(settings, TrainingSettings) and (run_dir / WEIGHTS).exists()
        ):
            write_json(run_dir / WEIGHTS, weights)
        if finished_result(run_dir) and not finished_result(run_dir, settings):
            withdraw(run_dir / RESULT)  # it goes on
        if begin is None or not goes_on or not (run_dir / CONFIG_FILE).exists():
            write_atomic(run_dir / CONFIG_FILE, dump(settings).encode())
        yield


def check_resume(run_dir: Path, resume: str) -> None:
    has = bool(list_checkpoints(run_dir))
    if resume == "must" and not has:
        raise SettingsError(
            f"resume: 'must', but {run_dir} has no checkpoint; check run_dir, or set resume=auto to"
            " start from scratch"
        )
    if resume == "never" and has:
        raise SettingsError(
            f"resume: 'never', but {run_dir} has checkpoints; name another run_dir, or set"
            " resume=auto to go on"
        )


def check_length(data: TrainingData, settings: TrainingSettings) -> None:
    """A training can be made longer, also after its end, but never shorter than it is."""
    run_dir, num_steps = Path(settings.run_dir), steps_of(settings, data)
    found, result = list_checkpoints(run_dir), finished_result(run_dir)
    present = step_of(found[-1]) if found else result["step"] if result else 0
    asked = (
        f"train.duration: {settings.train.duration} is {num_steps:,} step{'s' * (num_steps != 1)}"
    )
    if num_steps < present:
        raise SettingsError(
            f"{asked}, but {run_dir} is at step {present:,} already; give at least that, or name"
            " another run_dir"
        )
    if result and not found and num_steps > present:
        raise SettingsError(
            f"{asked}, but the checkpoints of {run_dir} are gone, so it cannot go on; name another"
            " run_dir"
        )
