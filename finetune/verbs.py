"""Options and steps that the commands of `finetune` share."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from data_prep.errors import SettingsError
from data_prep.explain import at_least
from data_prep.interrupts import keep
from pretrain.checkpoints.checkpoint import check_source
from pretrain.checkpoints.hub import is_on_hub
from pretrain.checkpoints.run import finished_result
from pretrain.ranks.launch import LAUNCHED_WITH
from pretrain.ranks.world import World


def add_common(
    verb: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, schema: str
) -> None:
    """Add the overrides and --ranks to a command. `schema`: the settings class, as module:Class."""
    verb.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="settings as key=value; dataset=X is short for data.dataset=X",
    )
    verb.add_argument("--ranks", type=at_least(1), help="number of ranks to start on this machine")
    verb.set_defaults(run=run, schema=schema, show=False)


def split_config(words: list[str]) -> tuple[str | None, list[str]]:
    """Return (CONFIG, other words), or (None, words) if the first word is not a YAML file."""
    is_config = bool(words) and "=" not in words[0] and words[0].endswith((".yaml", ".yml"))
    return (words[0], words[1:]) if is_config else (None, words)


def check_config(config: str, *, command: str) -> None:
    """Fail if CONFIG is a folder or hub repository of weights. The message suggests `command`."""
    if Path(config).is_dir() or is_on_hub(config):
        fix = f"write {command} pretrained={config}"
        raise SettingsError("config", f"{config} is not a config file", fix, code="wrong-command")


def launch_ranks(
    verb: str, words: list[str], options: argparse.Namespace, *, heed_signals: bool = False
) -> int:
    from pretrain.ranks.launch import launch

    allowed = [f"--allow-import={path}" for path in options.allow_import]
    command = [sys.executable, "-m", "finetune", verb, *words, *options.overrides, *allowed]
    return launch(command, num_ranks=options.ranks, heed_signals=heed_signals)


def finished_before(run_dir: Path, pretrained: str | None, world: World) -> bool:
    """Return True and print a message if the run has finished. Fail if the weights have changed
    since then."""
    if finished_result(run_dir) is None:
        return False
    check_source(run_dir, pretrained)
    if world.is_first:
        print(f"{run_dir}: the run finished before; choose another run_dir to repeat it")
    return True


def warn_once(warning: str | None, world: World) -> None:
    """Print a warning on the first rank, unless the launcher of the ranks has printed it."""
    if warning is not None and world.is_first and LAUNCHED_WITH not in os.environ:
        print(f"finetune: {warning}", file=sys.stderr)


def end_on_signals(kept: str) -> None:
    """Let SIGTERM and SIGUSR2 raise KeyboardInterrupt, as Ctrl-C does. `kept`: part of the message
    that says what is saved."""
    keep(f"{kept}; the same command starts from the beginning")
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler)
