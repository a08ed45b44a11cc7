"""Command line: `finetune probe | knn | tune | evaluate | predict | export | import`.

--ranks N, accelerate, torchrun or srun start several ranks.
"""

from data_prep.exit_codes import run_command
from data_prep.explain import Parser, Verbs, program
from finetune.evaluate import command as judging
from finetune.export import command as exporting
from finetune.predict import command as predicting
from finetune.probe import command as probing
from finetune.tune import command as tuning
from finetune.weights import command as importing
from pretrain.models.imported import add_allow_import
from pretrain.ranks.world import rank_of


def main(arguments: list[str] | None = None) -> int:
    return run_command("finetune", make_parser().parse_args(arguments), rank=rank_of())


def make_parser() -> Parser:
    words = "Probe, fine-tune, evaluate, export and import checkpoints, and predict images."
    return program("finetune", description=words, add_verbs=_add_verbs)


def _add_verbs(verbs: Verbs) -> None:
    for command in (probing, tuning, judging, predicting, exporting, importing):
        command.add_verbs(verbs)
    for name in verbs.choices.keys() - {"import"}:
        add_allow_import(verbs.choices[name])
