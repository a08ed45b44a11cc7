"""Command line of the second floor: `pretrain start | train | preview | show | models | widths |
plan | import | sync | serve`.

Heavy imports wait until the config is known to be good. Long because the options of all verbs of
the floor stand here.
"""

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import OK, exit_code_of, message_of
from data_prep.explain import Verbs, at_least, program
from data_prep.interrupts import INTERRUPTED
from data_prep.limits import limit_remedy
from data_prep.local_copy import local_copy
from data_prep.manifest import load_manifest
from data_prep.progress import doing
from data_prep.publish import Busy
from data_prep.settings import differences, dump, load_settings, near_path, read_lines
from pretrain import start
from pretrain.checkpoints.card import CONFIG
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.mirror import bring
from pretrain.checkpoints.run import (
    check_branch,
    check_length,
    check_resume,
    check_settings,
    finished_result,
    is_begun,
    list_checkpoints,
    load_run_settings,
    run_and_length,
    steps_of,
)
from pretrain.config import (
    PretrainSettings,
    SinkName,
    check_against_ranks,
    check_installed,
    parse_length,
)
from pretrain.data.datasets import StreamData, TrainingData, check_against_data, load_training_data
from pretrain.engine.zero_cost import NUM_STATES
from pretrain.models.spec import Activation
from pretrain.ranks.launch import LAUNCHED_WITH, launch
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World, free_port, rank_of, read_alone, read_world

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: list[str] | None = None) -> int:
    return guarded("pretrain", _parser().parse_args(arguments))


def guarded(program: str, options: argparse.Namespace) -> int:
    """Runs the chosen verb. What the user can mend is its message alone; a mistake of ours keeps
    its traceback."""
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        message, is_started = message_of(error), getattr(options, "started", False)
        # before the start every rank finds the same mistake, so the first one reports it; later a
        # rank may be alone with its error
        alone = isinstance(error, OSError | Busy) or (
            is_started and not getattr(error, "of_all_ranks", False)
        )
        code, remedy = exit_code_of(error, is_started=is_started), limit_remedy(error)
        if isinstance(error, OSError):
            is_ours = error.errno not in _MENDABLE and remedy is None
        else:
            is_ours = is_started and not isinstance(error, UserError)
        if is_ours:
            raise
        if isinstance(error, OSError):
            message = f"{error}; {remedy or 'fix that'}, and the same command resumes"
    rank = rank_of()
    if rank == 0 or alone:
        print(
            f"{program}: {message}" if rank == 0 else f"{program}, rank {rank}: {message}",
            file=sys.stderr,
        )
    return code


_MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def _parser() -> argparse.ArgumentParser:
    parser = program(
        "pretrain",
        description="Pretrains all-MLP vision models with DeepSpeed ZeRO.",
        add_verbs=_add_verbs,
    )
    # the `deepspeed` launcher passes it unless asked not to; the environment, which it sets as
    # well, is what counts
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    return parser


def _add_verbs(verbs: Verbs) -> None:
    start.add_verb(verbs)
    train = _add_config(verbs, "train", _train, help="train a config, or resume a run directory")
    train.epilog = """pretrain train configs/pretrain/demo_mlp.yaml dataset=data/mine run_dir=runs/mine epochs=20
pretrain train configs/pretrain/demo_mlp.yaml --ranks 2 dataset=data/mine run_dir=runs/mine lr=3e-4 precision=fp32
pretrain train runs/mine
pretrain train runs/mine epochs=40"""  # noqa: E501 (a table)
    train.add_argument(
        "--ranks",
        type=at_least(1),
        help="start this many local ranks (torchrun and srun work as well)",
    )
    preview = _add_config(
        verbs, "preview", _preview, help="draw the pictures that a config feeds to the model"
    )
    preview.epilog = (
        "pretrain preview configs/pretrain/demo_mlp.yaml dataset=data/mine mixup_alpha=0.8 --out"
        " preview.png"
    )
    preview.add_argument(
        "--out", type=Path, default=Path("preview.png"), help="a PNG file (default: preview.png)"
    )
    preview.add_argument(
        "--count", type=at_least(1), default=64, help="how many pictures (default: 64)"
    )
    preview.add_argument(
        "--epoch",
        type=at_least(0),
        default=0,
        help="of which epoch they are the first (default: 0)",
    )
    show = _add_config(verbs, "show", _show, help="print the resolved config")
    show.epilog = "pretrain show configs/pretrain/demo_mlp.yaml lr=3e-4"
    models = verbs.add_parser(
        "models", help="list the named models with their parameters, multiply-adds and widths"
    )
    models.add_argument(
        "--classes",
        type=at_least(1),
        help="of the head (default: 1000, or 10 for the models of small datasets)",
    )
    models.add_argument(
        "--image-size", type=at_least(1), help="in pixels (default: what each is meant for)"
    )
    models.add_argument(
        "--match", default="*", metavar="GLOB", help="only such names, for example 'mixer_*'"
    )
    models.epilog = "pretrain models --match 'mixer_*'"
    models.set_defaults(run=_models)
    widths = verbs.add_parser(
        "widths", help="sizes of mixers and SW-MLPs that have a given number of connections"
    )
    widths.add_argument(
        "--omega", required=True, help="average connections per layer, such as 2^18 or 2.6e8"
    )
    widths.add_argument(
        "--gamma",
        type=float,
        default=1.0,
        help="hidden width as a multiple (default: 1, the S-Mixer)",
    )
    widths.add_argument("--channels", metavar="C,C,...", help="print S and m for each")
    widths.add_argument("--density", metavar="P,P,...", help="print m of a SW-MLP for each")
    widths.epilog = "pretrain widths --omega 2^18 --channels 16,64,256"
    widths.set_defaults(run=_widths)
    _add_plan(
        verbs.add_parser(
            "plan",
            help=(
                "on how many nodes a model trains fastest, and what each ZeRO stage would cost"
                " there"
            ),
        )
    )
    _add_import(
        verbs.add_parser("import", help="make a folder like a checkpoint of foreign weights")
    )
    sync = verbs.add_parser(
        "sync",
        help="deliver what a run's journal still holds to MLflow, or write it for another tool",
    )
    sync.epilog = "pretrain sync runs/mine"
    sync.add_argument("run_dir", type=Path, help="of the run")
    sync.add_argument(
        "--to",
        choices=("mlflow", *get_args(SinkName)),
        default="mlflow",
        help="or write it for another tool (default: mlflow)",
    )
    sync.set_defaults(run=_sync)
    serve = verbs.add_parser(
        "serve", help="show the runs of a folder in MLflow, and write to its store for all of them"
    )
    serve.epilog = "pretrain serve runs"
    serve.add_argument("folder", type=Path, help="with mlflow.db in it, or to be")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="the name that others reach this machine by (default: 127.0.0.1, nobody else)",
    )
    serve.add_argument("--port", type=at_least(1), help="(default: one that is free)")
    serve.set_defaults(run=_serve)


def _add_config(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=help)
    verb.add_argument(
        "config",
        help="a YAML file, such as configs/pretrain/demo_mlp.yaml, or the directory of a run",
    )
    verb.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="key=value, such as optimizer.lr=1e-4, or short lr=1e-4",
    )
    verb.set_defaults(run=run, schema="pretrain.config:PretrainSettings")
    return verb


def _add_plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "model", help="a name that `pretrain models` lists, or a config of `pretrain train`"
    )
    verb.add_argument("overrides", nargs="*", default=[], help="key=value, of a config")
    verb.add_argument(
        "--batch", type=at_least(1), help="global batch size (default: the config's, or 4096)"
    )
    verb.add_argument(
        "--samples",
        type=at_least(1),
        help="of an epoch of a config (default: as its dataset has, where it is there)",
    )
    verb.add_argument(
        "--nodes", default="1,2,4,8,16,32", help="with commas between (default: 1,2,4,8,16,32)"
    )
    verb.add_argument("--gpus", type=at_least(1), default=4, help="of a node (default: 4)")
    precisions, optimizers = ("fp32", "tf32", "bf16", "fp16"), ("lion", "sgd", "adamw", "lamb")
    verb.add_argument(
        "--precision", choices=precisions, help="of the passes (default: the config's, or bf16)"
    )
    verb.add_argument(
        "--optimizer",
        choices=optimizers,
        help="by what it keeps for each weight (default: the config's, or lion)",
    )
    verb.add_argument(
        "--classes",
        type=at_least(1),
        help="of the head (default: the dataset's, or what the model is meant for)",
    )
    verb.add_argument(
        "--image-size",
        type=at_least(1),
        help="in pixels (default: the config's, or what the model is meant for)",
    )
    verb.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="the stage whose step is timed (default: the config's, or 1)",
    )
    verb.add_argument(
        "--micro-batch",
        type=at_least(1),
        help="that a GPU takes at once (default: the config's, or its whole share)",
    )
    verb.add_argument(
        "--gbit", type=at_least(1), default=200, help="a second, of a node's network (default: 200)"
    )
    inside = "a second, from a GPU to another of its node: PCIe 5 has 500 (default: 3600, NVLink 4)"
    verb.add_argument("--gbit-inside", type=at_least(1), default=3600, help=inside)
    verb.add_argument(
        "--teraflops", type=at_least(1), default=300, help="that a GPU reaches (default: 300)"
    )
    verb.epilog = "pretrain plan mlp_b12_wi1024 --batch 16384 --nodes 1,4,32"
    verb.description = (
        "What each ZeRO stage would cost on a cluster, how long a step would take there, and how"
        " many nodes are best; of a config also the GPU-hours, as a lower bound."
    )
    verb.set_defaults(run=_plan)


def _add_import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "file", type=Path, help="a torch or safetensors file of scaling_mlps, or of a timm mixer_*"
    )
    verb.add_argument("--out", type=Path, required=True, help="the folder to write")
    verb.add_argument(
        "--classes", help="names: a text file with one per line, or a dataset; or their number"
    )
    verb.add_argument("--name", help="what the weights were trained on (default: the file's name)")
    verb.add_argument(
        "--flattening", choices=("chw", "hwc"), default="chw", help="of the pixels (default: chw)"
    )
    verb.add_argument(
        "--activation",
        choices=get_args(Activation),
        help="not in the weights (default: of the config beside the file, or gelu)",
    )
    both = (
        "of a training file that holds both: the running average, or the weights as trained"
        " (default: ema, as timm)"
    )
    verb.add_argument("--weights", choices=("ema", "raw"), default="ema", help=both)
    for name in ("mean", "std"):
        verb.add_argument(
            f"--{name}", type=float, nargs=3, help="of the colours, on the scale 0..1"
        )
    verb.epilog = (
        "pretrain import B-12_Wi-1024_res_64_cifar10 --out runs/public --classes data/cifar10"
    )
    verb.set_defaults(run=_import)


def world_of(options: argparse.Namespace) -> World:
    """Of the ranks about to be started with --ranks, as their first one; else of this process."""
    return World(rank=0, local_rank=0, num_ranks=options.ranks) if options.ranks else read_world()


def ranks_of(world: World) -> str:
    return f"{world.num_ranks} rank{'s' * (world.num_ranks > 1)}"


def warn_if_enlarged(data: TrainingData, run_dir: str) -> None:
    stored = data.parts[0].stored_size(data.image_size)
    if stored < data.image_size:
        print(
            f"{run_dir}: images are stored with {stored} px and enlarged to {data.image_size} px",
            flush=True,
        )


def _train(options: argparse.Namespace) -> int:
    if not options.ranks:
        StopFlag().install()  # before the long imports: what comes while they last counts
    settings = load_run_settings(PretrainSettings, path=options.config, overrides=options.overrides)
    run_dir = Path(settings.run_dir)
    world = world_of(options)
    check_settings(run_dir, settings)
    bring(settings, world)
    result = finished_result(run_dir, settings)
    if result is not None:
        if world.is_first:
            print(
                f"{run_dir}: finished before, at step {result['step']}; raise train.duration to go"
                " on, or name another run_dir"
            )
        return OK
    data = load_training_data(settings.data)
    check_against_data(data, model=settings.model, train=settings.train, schedule=settings.schedule)
    check_length(data, settings)
    check_resume(run_dir, settings.resume)
    check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    data.check_ranks(world.num_ranks)
    start = _start_of(settings, data, world)
    if options.ranks or (
        world.is_first and LAUNCHED_WITH not in os.environ
    ):  # before the long imports
        engine = settings.engine
        what = (
            f"{settings.model.label} on {ranks_of(world)}, ZeRO {engine.zero_stage},"
            f" {engine.precision}"
        )
        print(
            f"{settings.run_dir}: starting {what}; loading DeepSpeed takes some seconds", flush=True
        )
        if isinstance(data, StreamData):
            print(f"{settings.run_dir}: {data.in_words}", flush=True)
        warn_if_enlarged(data, settings.run_dir)
    if options.ranks:
        command = [sys.executable, "-m", "pretrain", "train", options.config, *options.overrides]
        return launch(command, num_ranks=options.ranks, heed_signals=True)
    options.started = True
    from pretrain.loop.train import Pretraining, summary, train

    outcome = train(Pretraining(settings, data, start), world)
    dataset = settings.data.eval_dataset or settings.data.dataset
    more = summary(outcome, run_dir, dataset=dataset, data=data) if outcome.finished else []
    return leave(outcome.finished, run_dir=run_dir, is_first=world.is_first, more=more)


def _start_of(settings: PretrainSettings, data: TrainingData, world: World) -> Checkpoint | None:
    """What a run begins with; one that has a checkpoint goes on from that."""
    source = settings.start_from
    if source is None or list_checkpoints(Path(settings.run_dir)):
        return None
    found, is_branch = (
        Checkpoint.open(source, verify=world.local_rank == 0),
        run_and_length(source)[1] != "",
    )
    if is_branch:
        check_branch(source, settings)
        num_steps = steps_of(settings, data)
        if num_steps <= found.card.step:
            asked = (
                f"{settings.train.duration} is {num_steps:,} steps, but {source} is at step"
                f" {found.card.step:,}"
            )
            raise SettingsError(
                f"train.duration: {asked}; a branch goes on from there, so give more"
            )
    card = found.card
    models = (card.model, card.image_size, card), (settings.model, data.image_size, settings.data)
    there, here = (
        {
            "model": spec.model_dump(mode="json"),
            "image_size": size,
            "data.pixel_permutation": pixels.pixel_permutation,
        }
        for spec, size, pixels in models
    )
    if differ := differences(there, here, is_free=lambda key, old, new: key == "model.dropout"):
        raise SettingsError(
            f"start_from: {source} holds another model ({differ} there); set model as there, or"
            " name another"
        )
    if world.is_first and LAUNCHED_WITH not in os.environ:
        is_same, counts = (
            card.classes == data.classes,
            f"{len(data.classes):,} classes here, {len(card.classes):,} there",
        )
        head = (
            "with the head, whose classes are the same"
            if is_same
            else f"but for the head, whose classes are others ({counts})"
        )
        if is_branch:
            head = "the optimizer and the place in the data"
        print(f"{settings.run_dir}: takes the weights of {found.directory}, {head}")
        statistics = (data.channel_statistics, (card.channel_mean, card.channel_std))
        own, learned = (
            " / ".join(" ".join(f"{value:.3f}" for value in row) for row in each)
            for each in statistics
        )
        if own != learned:
            print(
                f"{settings.run_dir}: channels are normalised by this data's mean / std, {own}; the"
                f" weights learned with {learned}"
            )
        for part in data.parts:
            if warning := card.other_pixels(part.manifest, dataset=str(part.directory)):
                print(f"pretrain: {warning}", file=sys.stderr)
    return found


def leave(finished: bool, *, run_dir: Path | None, is_first: bool, more: Sequence[str] = ()) -> int:
    """End this rank at once. Its heartbeat has ended, so no other rank would notice if it died
    later.

    A stopped run exits with 0, too, because result.json shows whether to start it again. SLURM does
    not read that file: in a job the first rank of a stopped run exits with 130, so jobs that wait
    with --dependency=afterok do not begin. The other ranks exit with 0, because some sites kill a
    step at its first bad exit.
    """
    if is_first and run_dir is not None:
        stopped = "stopped with a checkpoint; the same command goes on from there"
        if not list_checkpoints(run_dir):
            stopped = "stopped before its first checkpoint; the same command begins anew"
        print("\n".join([f"{run_dir}: {'finished' if finished else stopped}", *more]))
    sys.stdout.flush()
    sys.stderr.flush()
    code = OK if finished or not is_first or "SLURM_JOB_ID" not in os.environ else INTERRUPTED
    os._exit(
        code
    )  # interpreter shutdown after gloo dies now and then in a destructor (SEEN: 7 of 37 runs)


def _preview(options: argparse.Namespace) -> int:
    from data_prep.images.sheet import check_out, save_sheet

    check_out(options.out)
    settings = load_run_settings(PretrainSettings, path=options.config, overrides=options.overrides)
    data = load_training_data(settings.data)  # before torch, for the mistakes that it may find
    with doing("loading torch"):
        from pretrain.loop.preview import preview

    sheet = preview(
        settings, data, count=options.count, epoch=options.epoch, num_threads=read_alone().num_cores
    )
    save_sheet(sheet, options.out)
    print(f"{options.out}: {options.count} pictures, {sheet.width} x {sheet.height}")
    return OK


def _show(options: argparse.Namespace) -> int:
    print(
        dump(load_run_settings(PretrainSettings, path=options.config, overrides=options.overrides)),
        end="",
    )
    return OK


def console() -> "Console":
    """As wide as the terminal, but never so narrow that a table would lose columns: there its lines
    wrap."""
    from rich.console import Console

    return Console(width=max(shutil.get_terminal_size((120, 24)).columns, 100), highlight=False)


def _models(options: argparse.Namespace) -> int:
    from pretrain.models.listing import list_models, print_models

    rows, unfit = list_models(
        match=options.match, num_classes=options.classes, image_size=options.image_size
    )
    print_models(rows, unfit, console())
    return OK


def _widths(options: argparse.Namespace) -> int:
    from pretrain.models.listing import parse_channels, parse_densities, parse_power, print_widths

    print_widths(
        parse_power(options.omega),
        gamma=options.gamma,
        channels=parse_channels(options.channels) if options.channels else [],
        densities=parse_densities(options.density) if options.density else [],
        console=console(),
    )
    return OK


def _plan(options: argparse.Namespace) -> int:
    from pretrain.data.order import epoch_length
    from pretrain.engine.zero_cost import Plan, plan_of, print_plan
    from pretrain.models.listing import parse_channels
    from pretrain.models.presets import preset, spec_of

    cluster = {
        "name": options.model,
        "num_nodes": parse_channels(options.nodes, field="--nodes"),
        "gpus_per_node": options.gpus,
        "gbit_per_s": options.gbit,
        "gbit_per_s_inside": options.gbit_inside,
        "teraflops": options.teraflops,
    }
    given = {
        "global_batch_size": options.batch,
        "precision": options.precision,
        "micro_batch_size": options.micro_batch,
    }
    given |= {"stage": options.zero, "num_states": NUM_STATES.get(options.optimizer)}
    given = {name: value for name, value in given.items() if value is not None}
    classes, size, samples = options.classes, options.image_size, options.samples
    if options.model.endswith((".yaml", ".yml")):
        settings = load_settings(PretrainSettings, path=options.model, overrides=options.overrides)
        size, last_batch = size or settings.data.image_size, settings.data.last_batch
        if not (samples and classes and size):
            try:
                data = load_training_data(settings.data)
            except ValueError as error:
                raise UserError(
                    f"{error} (or give --samples, --classes and --image-size)"
                ) from None
            samples, classes, size = (
                samples or data.num_samples,
                classes or len(data.classes),
                size or data.image_size,
            )
        plan = replace(plan_of(settings, num_classes=classes, image_size=size, **cluster), **given)
        samples = epoch_length(
            samples, global_batch_size=plan.global_batch_size, last_batch=last_batch
        )
        length = parse_length(settings.train.duration)
        plan = replace(
            plan,
            num_steps=length.steps(global_batch_size=plan.global_batch_size, num_samples=samples),
        )
    else:
        known, spec = (
            preset(options.model),
            spec_of(options.model),
        )  # or a word on what is named like it
        sizes = {
            "num_classes": classes or known.num_classes,
            "image_size": size or known.image_size,
        }
        plan = Plan(spec=spec, **{"global_batch_size": 4096} | cluster | sizes | given)
    wrong = [
        count for count in plan.num_nodes if plan.global_batch_size % (count * plan.gpus_per_node)
    ]
    if wrong:
        gpus = f"{wrong[0]} x {plan.gpus_per_node} GPUs"
        raise ValueError(
            f"--batch: {plan.global_batch_size} does not split over {gpus}; choose another, or"
            " other --nodes"
        )
    print_plan(plan, console())
    return OK


def _import(options: argparse.Namespace) -> int:
    file: Path = options.file
    if not file.is_file():
        inside = sorted(
            path
            for ending in ("safetensors", "bin", "pth", "pt")
            for path in file.glob(f"*.{ending}")
        )
        such_as = f", such as {inside[0]}" if inside else ""
        near = f"give the file of weights in it{such_as}" if file.exists() else near_path(file)
        raise UserError(
            f"{file}: is {'a directory' if file.exists() else 'not there'};"
            f" {near or 'give a file of weights'}"
        )
    if (options.mean is None) != (options.std is None):
        raise UserError("--mean and --std: one is given without the other; give both")
    for name, values in (("mean", options.mean), ("std", options.std)):
        if values and not all(
            0 <= value <= 1 and value >= (name == "std") * 1e-3 for value in values
        ):
            row = " ".join(f"{value:.4g}" for value in values)
            raise UserError(
                f"--{name}: {row} is not on the scale 0..1; divide what is meant for 0..255 by 255"
            )
    if (
        options.classes is not None and not options.classes.isdigit()
    ):  # they are there, and can be read
        dataset = local_copy(options.classes, storage=None)
        load_manifest(dataset) if dataset.is_dir() else read_lines("--classes", options.classes)
    if not (options.out / CONFIG).exists():
        is_begun(options.out, {}, record=CONFIG, what="these weights", field="out", alone=True)
    with doing("loading torch"):
        from pretrain.checkpoints.importing import import_weights

    print("\n".join(import_weights(options)))
    return OK


def _sync(options: argparse.Namespace) -> int:
    if not (options.run_dir / "tracking" / "identity.json").exists():
        raise ValueError(
            f"{options.run_dir}: is not a run directory with a journal; give runs/NAME"
        )
    if options.to != "mlflow":
        check_installed(options.to)
        from pretrain.tracking.delivery import write_sinks

        print(
            f"{options.run_dir / 'tracking' / options.to}:"
            f" {write_sinks(options.run_dir, options.to):,} events of the journal"
        )
        return OK
    with doing("loading MLflow"):
        from pretrain.tracking.delivery import sync

    print(f"{options.run_dir}: {sync(options.run_dir):,} bytes of the journal delivered")
    return OK


def _serve(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise UserError(
            f"{options.folder}: is no folder;"
            f" {near_path(options.folder) or 'give the one that runs are in'}"
        )
    try:
        port = options.port or free_port(options.host)
    except OSError as error:
        raise UserError(
            f"--host: {options.host} is no name of this machine ({error.strerror}); see hostname -f"
        ) from None
    with doing("loading MLflow"):
        from pretrain.tracking.server import serve

    options.started = True
    serve(options.folder, host=options.host, port=port)
    return OK
