"""Command line of `data_prep`; the commands are registered in `data_prep.commands`."""

from data_prep.commands import add_verbs
from data_prep.exit_codes import run_command
from data_prep.explain import Parser, program
from data_prep.interrupts import keep


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    keep(options.after_a_stop)
    return run_command("data_prep", options)


def make_parser() -> Parser:
    about = "Make WebDataset shards with an index and checksums from image archives."
    return program("data_prep", description=about, add_verbs=add_verbs)
