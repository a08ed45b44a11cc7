"""`analysis cost` and `analysis efficiency`."""

import argparse

from analysis.command import add_command, add_device, device_of
from analysis.output import Result
from data_prep.explain import Verbs, at_least
from data_prep.progress import doing


def add_commands(verbs: Verbs) -> None:
    cost = add_command(
        verbs,
        "cost",
        _cost,
        help="memory, FLOPs and seconds per epoch of the SW-MLP and Mixers of Table S.3 (Mixer"
        " paper)",
        epilog="analysis cost --quick",
    )
    efficiency = add_command(
        verbs,
        "efficiency",
        _efficiency,
        help="latency and throughput of the four models of Table 4 at 64 px (Scaling MLPs)",
        epilog="analysis efficiency --quick",
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
    for command in (cost, efficiency):
        command.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
        add_device(command)


def _cost(options: argparse.Namespace) -> Result:
    with doing("loading torch"):
        from analysis.speed.cost import cost
    return cost(device_of(options.device), quick=options.quick)


def _efficiency(options: argparse.Namespace) -> Result:
    with doing("loading torch"):
        from analysis.speed.efficiency import Conditions, efficiency
    device, quick, is_compiled = device_of(options.device), options.quick, options.compile
    on_gpu = device.type == "cuda"
    batch_size = (512 if quick else 1024) if on_gpu else (4 if quick else 16)
    conditions = Conditions(
        device.type,
        options.dtype or ("bf16" if on_gpu else "fp32"),
        on_gpu if is_compiled is None else is_compiled,
        options.batch or batch_size,
        *((3, 0.2) if quick else (7, 1.0)),
    )
    return efficiency(conditions)
