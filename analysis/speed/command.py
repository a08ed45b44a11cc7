"""`analysis cost` and `analysis efficiency`."""

import argparse

from analysis.device import add_device
from analysis.output import Result, add_out
from data_prep.explain import Verbs, at_least
from data_prep.progress import doing


def add_commands(commands: Verbs) -> None:
    cost = commands.add_parser(
        "cost",
        help="memory, FLOPs and seconds per epoch of the SW-MLP and Mixers of Table S.3 (Mixer"
        " paper)",
        epilog="analysis cost --quick",
    )
    cost.add_argument(
        "--quick", action="store_true", help="one round of one step each: a minute on 2 cores"
    )
    cost.set_defaults(run=_cost)
    efficiency = commands.add_parser(
        "efficiency",
        help="latency and throughput of the four models of Table 4 at 64 px (Scaling MLPs)",
        epilog="analysis efficiency --quick",
    )
    efficiency.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds: a few minutes on 2 cores"
    )
    efficiency.add_argument(
        "--batch", type=at_least(1), help="images in a batch (default: 1024 on cuda, 16 on a CPU)"
    )
    efficiency.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="default: bf16 on cuda, fp32 on a CPU"
    )
    efficiency.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="default: on cuda only"
    )
    efficiency.set_defaults(run=_efficiency)
    for command, name in ((cost, "cost"), (efficiency, "efficiency")):
        add_device(command)
        add_out(command, name)


def _cost(options: argparse.Namespace) -> Result:
    with doing("loading torch"):
        from analysis.speed.cost import cost
    return cost(options.device, quick=options.quick)


def _efficiency(options: argparse.Namespace) -> Result:
    with doing("loading torch"):
        from analysis.speed.efficiency import choose_conditions, efficiency
    given = (options.dtype, options.compile, options.batch)
    return efficiency(choose_conditions(options.device, *given, quick=options.quick))
