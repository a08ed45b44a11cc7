"""Command line of the third floor: `finetune probe | tune | evaluate | predict | export`.

Started by --ranks N, accelerate, torchrun or srun.
"""

import argparse

from data_prep.settings import Parser, parse_command_line
from finetune.evaluate import command as judging
from finetune.export import command as exporting
from finetune.predict import command as predicting
from finetune.probe import command as probing
from finetune.tune import command as tuning
from pretrain.cli import guarded


def main(arguments: list[str] | None = None) -> int:
    return guarded("finetune", parse_command_line(_parser(), arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="finetune", description="Probes, fine-tunes, evaluates, asks and exports pretrained checkpoints.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for room in (probing, tuning, judging, predicting, exporting):
        room.add_verbs(verbs)
    return parser
