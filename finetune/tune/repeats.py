"""One fine-tuning over several seeds, or over the folds of a split: runs of their own, then their mean and spread. No torch here.

    RUN/seed-0/ RUN/seed-1/ ...     each as `finetune tune` leaves it
    RUN/result.json                 of those named in it; written last

What is finished stays finished: the same command goes on with the one that was interrupted, and with further seeds.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.manifest import load_manifest
from data_prep.settings import SettingsError, read_yaml
from finetune.tune.config import TuneSettings
from pretrain.checkpoints.run import CONFIG_FILE, check_resume, finished_result, list_checkpoints
from pretrain.data.datasets import Part, num_folds

SPREAD = ("eval/top1", "eval/top5", "eval/loss", "eval/real")


def repeats_of(settings: TuneSettings) -> list[TuneSettings]:
    """The single runs; the settings themselves where nothing is repeated."""
    if settings.seeds is None and not settings.folds:
        return [settings]
    folds: Sequence[int | None] = [None]
    if settings.folds:
        directory, split = settings.data.dataset, settings.data.train_split
        manifest = load_manifest(directory)
        manifest.split(split, directory=directory)
        folds = range(num_folds(Part(Path(directory), manifest, split)))
        if not folds:
            raise ValueError(f"folds: split {split!r} of {directory} has none; leave it out")
    return [_repeat(settings, seed=seed, fold=fold) for fold in folds for seed in settings.seeds or (None,)]


def _repeat(settings: TuneSettings, *, seed: int | None, fold: int | None) -> TuneSettings:
    names = [f"{what}-{number}" for what, number in (("fold", fold), ("seed", seed)) if number is not None]
    train, data = settings.train, settings.data
    return settings.model_copy(
        update={
            "run_dir": str(Path(settings.run_dir) / "-".join(names)),
            "resume": "auto" if settings.resume == "must" else settings.resume,  # checked for all of them
            "seeds": None,
            "folds": False,
            "train": train if seed is None else train.model_copy(update={"seed": seed}),
            "data": data if fold is None else data.model_copy(update={"fold": fold}),
        }
    )


def check_kind(settings: TuneSettings) -> None:
    """A directory holds one run, or repetitions; `seeds` may grow, but not come and go."""
    path = Path(settings.run_dir) / CONFIG_FILE
    begun = read_yaml(path).get("seeds") if path.exists() else settings.seeds
    if (begun is None) != (settings.seeds is None):
        holds = "one run without seeds" if begun is None else f"a run for each of the seeds {list(begun)}"
        raise SettingsError(f"seeds: {settings.run_dir} holds {holds}; name another run_dir, or set seeds as it was")


def check_resume_of(settings: TuneSettings, repeats: list[TuneSettings]) -> None:
    """Of repetitions any checkpoint or result is something to go on from."""
    places = [Path(each.run_dir) for each in repeats]
    unfinished = [place for place in places if finished_result(place) is None]
    if settings.resume == "must" and (len(unfinished) < len(places) or any(map(list_checkpoints, places))):
        return
    for place in unfinished:
        check_resume(place, settings.resume)


def is_finished(settings: TuneSettings) -> bool:
    """Whether nothing of what is asked for is left to do."""
    result, repeats = finished_result(Path(settings.run_dir)), repeats_of(settings)
    return result is not None and (repeats == [settings] or set(_names(repeats)) <= set(result["runs"]))


def summary(repeats: list[TuneSettings]) -> dict[str, Any]:
    """The mean under the name of the figure itself, the sample standard deviation beside it; all runs are finished."""
    results = {name: finished_result(Path(each.run_dir)) or {} for name, each in zip(_names(repeats), repeats, strict=True)}
    found: dict[str, Any] = {"runs": results, "num_runs": len(results)}
    for name in SPREAD:
        values = [result[name] for result in results.values() if name in result]
        found |= {name: statistics.fmean(values)} if values else {}
        found |= {f"{name}_std": statistics.stdev(values)} if len(values) > 1 else {}
    return found


def in_words(result: dict[str, Any]) -> str:
    """Of a summary: mean +- spread."""
    if "eval/top1" not in result:
        return f"{result['num_runs']} runs, not evaluated"
    spread = f" +- {100 * result['eval/top1_std']:.2f}" if "eval/top1_std" in result else ""
    return f"top-1 {100 * result['eval/top1']:.2f}{spread} % over {result['num_runs']} runs"


def _names(repeats: list[TuneSettings]) -> list[str]:
    return [Path(each.run_dir).name for each in repeats]
