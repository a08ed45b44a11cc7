"""A run directory: its files, its owner, and the remaining work.

    RUN/config.yaml       the resolved settings
    RUN/checkpoints/      see checkpoint.py
    RUN/tracking/         see tracker.py
    RUN/micro_batch.json  see micro_batch.py; only with local_batch_size auto
    RUN/logs/             warnings of DeepSpeed and Python, one file per rank
    RUN/checked/          see first_read.py
    RUN/bad_samples/      see bad_samples.py; only if there are any
    RUN/skipped_steps/    see skipped_steps.py; only if there are any
    RUN/profile/          see profile_window.py; only with tracking.profile
    RUN/stacks/           see watchdog.py; only if a run hung, or a rank fell silent
    RUN/starts/           see starts.py
    RUN/remote/           see remote.py; only with checkpoint.remote
    RUN/evaluation.json   identity of an evaluation; only in evaluations
    RUN/record.json       task, plan, labels, seed and parents; see pretrain/record.py
    RUN/result.json       written last

A run with result.json is finished.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
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
    without_removed,
)
from pretrain.checkpoints.hub import is_on_hub
from pretrain.config import DataSettings, TrainingSettings, parse_length, parse_window
from pretrain.data.datasets import TrainingData, load_training_data
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.settings import RanksSettings
from pretrain.ranks.starts import check_owner, hold_run
from pretrain.record import RECORD, read_record

RESULT, CONFIG_FILE = "result.json", "config.yaml"
EVALUATION = "evaluation.json"

MAY_CHANGE = (
    "run_dir",
    "resume",
    "allow_import",
    "record",
    "seeds",
    "ranks",
    "checkpoint",
    "local_batch_size",
    "feature_batch_size",
    "features_dir",
    "features",
    "cache_gb",
    "tracking.enabled",
    "tracking.peak_teraflops",
    "tracking.profile",
    "tracking.sinks",
    "engine.zero_stage",
    "engine.offload",
    "engine.activation_checkpointing",
    "engine.compile",
    "engine.timeout_s",
    "engine.heartbeat_timeout_s",
    "engine.hang_timeout_s",
    "engine.lock_wait_s",
    "data.cache_dir",
    "data.cache_gb",
    "data.verify_hashes",
    "data.max_bad_fraction",
    "data.stage_dir",
    "train.duration",
    "train.local_batch_size",
    "train.log_every_steps",
    "train.eval_every",
    "train.loader_threads",
    "train.max_skipped_steps",
    "train.prefetch_batches",
)
"""Settings that a resume may change. They change results at most by rounding, except
`train.duration` (see `check_length`)."""
PLACES = ("data.dataset", "data.extra_datasets")
"""Settings with addresses of data. They may change if the new address has the same images."""


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Return True for `step-` plus digits. Other names, such as step-00000010.bak, are the user's
    own."""
    return re.fullmatch(r"step-[0-9]+", name) is not None


def list_checkpoints(run_dir: Path) -> list[Path]:
    return sorted(
        (path for path in checkpoints_dir(run_dir).glob("step-*") if is_checkpoint_name(path.name)),
        key=step_of,
    )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


# ---- places that users name


def stored_config(schema: type[Settings], path: str) -> Path | None:
    """Return the config of a run, or None if `path` is not a run of the schema's command."""
    stored = Path(path) / CONFIG_FILE
    is_run = stored.is_file() and schema.of_verb in verbs_of(read_yaml(stored).keys())
    return stored if is_run else None


def load_run_settings(schema: type[S], *, path: str, overrides: list[str]) -> S:
    """Load a config file, or the settings of a run directory. Then apply `overrides`."""
    if stored := stored_config(schema, path):
        path, overrides = str(stored), [f"run_dir={in_yaml(str(Path(path)))}", *overrides]
    return load_settings(schema, path=path, overrides=overrides)


def run_and_length(place: str) -> tuple[str, str]:
    """Split RUN@50epochs into (RUN, 50epochs). Any other text returns (text, "")."""
    name, at, length = place.rpartition("@")
    if at and not is_on_hub(place) and "/" not in length and not Path(place).exists():
        return name, length
    return place, ""


def checkpoint_at(place: str) -> Path | None:
    """Return the checkpoint of RUN@50epochs or RUN@1200steps, or None for another text. Raise
    SettingsError if the run has no such checkpoint. The run's batch size and data convert the
    length to a step."""
    name, words = run_and_length(place)
    run_dir = Path(name)
    config = run_dir / CONFIG_FILE
    begun = read_yaml(config) if words and config.is_file() else {}
    if "train" not in begun:  # only trainings have lengths
        return None
    length = parse_length(words)
    if length.unit == "steps":
        step = int(length.amount)
    else:
        data = load_training_data(validate(DataSettings, begun["data"]))
        step = data.steps(words, global_batch_size=begun["train"]["global_batch_size"])
    checkpoint = checkpoint_dir(run_dir, step)
    if checkpoint.is_dir():
        return checkpoint
    kept = ", ".join(f"{step_of(each):,}" for each in list_checkpoints(run_dir))
    remote = begun.get("checkpoint", {}).get("remote")
    copy = f"copy {remote}/checkpoints/{checkpoint.name} to {checkpoint}, or " if remote else ""
    other = f"choose one of the steps {kept}, or " if kept else ""
    raise SettingsError(
        place,
        f"{name} has no checkpoint of step {step:,}",
        f"{copy}{other}train again with checkpoint.milestones='[{words}]'",
        code="missing-path",
    )


# ---- results


def finished_result(run_dir: Path, asked: Settings | None = None) -> dict[str, Any] | None:
    """Return the result of a finished run, or None. `asked`: current settings. A training run is
    not finished if they ask for another number of steps."""
    config, path, duration = run_dir / CONFIG_FILE, run_dir / RESULT, None
    if not path.exists():  # without a result, the config may belong to another command
        return None
    if isinstance(asked, TrainingSettings) and config.exists():
        # read before the result, because `claim` removes the result first
        duration = read_yaml(config)["train"]["duration"]
    if not path.exists():
        return None
    result = _read_record(path, fix="restore it, or remove it and run the same command again")
    if not isinstance(asked, TrainingSettings) or duration in (None, asked.train.duration):
        return result
    with suppress(ValueError):  # the dataset is gone, so the two durations cannot be compared
        ends = {each["step"] for each in result.get("runs", {"": result}).values()}
        if ends == {steps_of(asked, load_training_data(asked.data))}:
            return result
    return None


def steps_of(settings: TrainingSettings, data: TrainingData) -> int:
    return data.steps(settings.train.duration, global_batch_size=settings.train.global_batch_size)


def save_result(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Add the identity of the initial weights to the result, save it and return it."""
    check_owner()
    result = result | begun_with(run_dir)
    write_json(run_dir / RESULT, result)
    return result


def begun_with(run_dir: Path) -> dict[str, Any]:
    """Return sha256, step and hub name of the weights from which a run began, or {} if unknown."""
    record = read_record(run_dir)
    parent = record.parents[0] if record and record.parents else None
    if parent is None or not parent.sha256:
        return {}
    weights = {"weights_sha256": parent.sha256, "weights_step": parent.checkpoint}
    return weights | ({"weights_from": parent.run} if is_on_hub(parent.run) else {})


def _read_record(path: Path, *, fix: str) -> dict[str, Any]:
    """Read a JSON or non-empty YAML file that one of our commands wrote. Raise SettingsError if the
    file is damaged."""
    detail = ""
    try:
        record = json.loads(path.read_text()) if path.suffix == ".json" else read_yaml(path) or None
        if isinstance(record, dict):
            return record
    except ValueError as error:
        detail = f" ({str(error).partition(': ')[0]})" if path.suffix == ".json" else f" ({error})"
    raise SettingsError(str(path), f"the file is damaged{detail}", fix, code="damaged")


# ---- owners


def check_settings(
    run_dir: Path, settings: Settings, facts: Mapping[str, Any] | None = None
) -> bool:
    """Return True if this run has begun in the directory, False if the directory is free. Raise
    SettingsError for other content. `facts`: checkpoint and data of an evaluation, to compare
    instead of settings."""
    record, kind = (CONFIG_FILE, "a run") if facts is None else (EVALUATION, "an evaluation")
    path, is_free, problem, fix = run_dir / record, is_worthless(run_dir), "", _ANOTHER
    if (run_dir / MANIFEST_NAME).exists():
        raise SettingsError("run_dir", f"{run_dir} is a dataset", fix, code="exists")
    try:
        begun = _read_record(path, fix="restore it, or " + fix) if path.exists() else None
    except SettingsError:
        if not is_free:
            raise
        begun = None
    is_same = False
    if begun is None:
        problem = f"{run_dir} exists and is not {kind}" if (run_dir / CONFIG_FILE).exists() else ""
    elif (
        facts is None and settings.of_verb not in ("", *(verbs := verbs_of(begun.keys()))) and verbs
    ):
        problem = f"{run_dir} is a run of {' or '.join(verbs)}"
    else:
        changes = (
            other_settings(begun, settings)
            if facts is None
            else differences(begun, facts, is_free=may_change)
        )
        is_same = not changes
        problem = f"{run_dir} belongs to {kind} with other settings ({changes})" * bool(changes)
        if isinstance(settings, TrainingSettings):
            fix = f"{fix}, or resume this run: {settings.of_verb} {run_dir}"
    if problem and not is_free:
        raise SettingsError("run_dir", problem, fix, code="exists")
    if finished_result(run_dir) is None:
        check_place(run_dir)
    return is_same


_ANOTHER = "choose another run_dir"


def is_output(
    directory: Path, wanted: Mapping[str, Any], *, record: str, key: str | None = None, kind: str
) -> bool:
    """Return True if the directory has this output, False if it is free. Raise SettingsError for
    other content, because an output appears atomically.

    `wanted`: required content of the file `record`, or of its entry `key`.
    """
    path, fix = directory / record, "choose another out"
    if not path.exists():
        if directory.is_file() or any(directory.glob("*")):
            raise SettingsError("out", f"{directory} exists and is not {kind}", fix, code="exists")
        check_place(directory, field="out")
        return False
    begun = _read_record(path, fix=fix)
    if changes := differences(begun if key is None else begun.get(key, {}), wanted):
        problem = f"{directory} belongs to {kind} with other settings ({changes})"
        raise SettingsError("out", problem, fix, code="exists")
    return True


def other_settings(begun: dict[str, Any], settings: Settings) -> str:
    """Return a description of the settings that prevent a resume, or "". If a setting is newer than
    the run, its default is assumed."""
    begun = without_removed(type(settings), begun)
    with suppress(SettingsError):  # the differences name settings that no longer exist
        begun = validate(type(settings), begun).model_dump(mode="json")
    return differences(begun, settings.model_dump(mode="json"), is_free=may_change)


def check_branch(source: str, settings: Settings) -> None:
    """Raise SettingsError if a branch of RUN@LENGTH differs from RUN in more than its schedule,
    tracking, and settings that a resume may change."""
    begun = read_yaml(Path(run_and_length(source)[0]) / CONFIG_FILE)
    wanted = settings.model_dump(mode="json")
    own = {key: wanted[key] for key in ("start_from", "schedule", "tracking")}
    if changes := other_settings(begun | own, settings):
        raise SettingsError(
            "start_from",
            f"{source} is continued with its settings, but yours differ ({changes})",
            "use the run's settings, or give the checkpoint's directory to load only its weights",
            code="conflict",
        )


def may_change(key: str, old: Any, new: Any) -> bool:
    """Return True if a resume may change this setting from `old` to `new`."""
    if key == "seeds" and None in (old, new):  # one run, and a group of runs
        return False
    if key in PLACES and _is_moved(old, new):
        return True
    return any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)


def _is_moved(old: Any, new: Any) -> bool:
    """Return True if both addresses have the same images. Extra datasets are compared pair by
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
    except (UserError, OSError):  # one place no longer exists
        return False


def check_place(run_dir: Path, *, field: str = "run_dir", remedy: str = "") -> None:
    """Raise SettingsError if the directory cannot be created. Call this function before ranks
    start."""
    above = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    is_writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    if not is_writable or above.is_relative_to("/proc"):
        problem = f"{run_dir} cannot be created, because {above} is not writable"
        fix = remedy or f"choose another {field}"
        raise SettingsError(field, problem, fix, code="no-access")


def is_worthless(run_dir: Path) -> bool:
    """Return True if the run and its repetitions ended before their first checkpoint. Other
    settings may then use the directory."""
    names = (RESULT, "checkpoints/*")
    return not any(any(run_dir.glob(above + name)) for name in names for above in ("", "*/"))


@contextmanager
def claim(
    run_dir: Path,
    settings: Settings,
    *,
    ranks: RanksSettings,
    stop: StopFlag | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Lock the run directory on the first rank, and write its config. `stop`: flag that ends the
    wait for the lock. `facts`: checkpoint and data of an evaluation, for evaluation.json."""
    # the other ranks wait during this time
    lock_wait_s = min(ranks.lock_wait_s, ranks.timeout_s / 2)
    with hold_run(run_dir, lock_wait_s=lock_wait_s, stop=stop):
        resumes = check_settings(run_dir, settings, facts)
        is_training = isinstance(settings, TrainingSettings)
        outdated = []
        if not resumes:  # MLflow gets a new run, too
            outdated = ["tracking", "micro_batch.json", "bad_samples", "skipped_steps"]
        if not resumes or not is_training:  # a probe begins again, perhaps with newer weights
            outdated.append(RECORD)
        if finished_result(run_dir) and not finished_result(run_dir, settings):
            outdated.append(RESULT)  # the run gets another length
        for name in outdated:
            if (run_dir / name).exists():
                withdraw(run_dir / name)
        if facts is None or not resumes or not (run_dir / CONFIG_FILE).exists():
            write_atomic(run_dir / CONFIG_FILE, dump(settings).encode())
        if facts is not None:
            write_json(run_dir / EVALUATION, facts)
        yield


def check_resume(run_dir: Path, resume: str) -> None:
    has = bool(list_checkpoints(run_dir))
    if resume == "must" and not has:
        fix = "check run_dir, or set resume=auto to start from scratch"
        raise SettingsError(
            "resume", f"'must' needs a checkpoint, but {run_dir} has none", fix, code="conflict"
        )
    if resume == "never" and has:
        fix = "choose another run_dir, or set resume=auto to resume"
        raise SettingsError(
            "resume", f"never is not valid, because {run_dir} has checkpoints", fix, code="exists"
        )


def check_length(data: TrainingData, settings: TrainingSettings) -> None:
    """Raise SettingsError if the run is already longer than `train.duration`, cannot resume, or
    ends before the steps of `tracking.profile`."""
    run_dir, num_steps = Path(settings.run_dir), steps_of(settings, data)
    kept, result = list_checkpoints(run_dir), finished_result(run_dir)
    present = step_of(kept[-1]) if kept else result["step"] if result else 0
    asked = f"{settings.train.duration} is {num_steps:,} step{'s' * (num_steps != 1)}"
    if num_steps < present:
        problem = f"{asked}, but {run_dir} is at step {present:,} already"
        fix = f"set '{present} steps' or more, or choose another run_dir"
        raise SettingsError("train.duration", problem, fix, code="conflict")
    window = settings.tracking.profile
    if window and parse_window(window)[-1] > num_steps:
        problem = f"{window!r} ends after the run's {num_steps:,} steps"
        raise SettingsError("tracking.profile", problem, "choose earlier steps", code="bad-value")
    if result and not kept and num_steps > present:
        problem = f"{asked}, but the checkpoints of {run_dir} are gone, so the run cannot resume"
        raise SettingsError("train.duration", problem, _ANOTHER, code="conflict")
