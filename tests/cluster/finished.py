"""Makes a run look finished, with the settings that it has: what `pretrain train` leaves, without the training."""

from pathlib import Path

from cluster.work import Work
from data_prep.settings import dump
from pretrain.checkpoints.run import CONFIG_FILE, save_result


def finish(work: Work) -> None:
    run_dir = Path(work.writes)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(dump(work.settings))
    save_result(run_dir, {"step": 1})
