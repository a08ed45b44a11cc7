"""Command line `pretrain recommend | train | preview | models | estimate | sync | ui`.

Heavy imports wait until the config is valid. The file is long because it has the options of all
commands.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from data_prep.errors import SettingsError, UserError
from data_prep.exit_codes import OK, run_command
from data_prep.explain import Parser, Verbs, at_least, program, show
from data_prep.interrupts import INTERRUPTED
from data_prep.progress import doing
from data_prep.settings import differences, load_settings, near_path
from pretrain import recommend
from pretrain.checkpoints.checkpoint import Checkpoint
from pretrain.checkpoints.remote import fetch_run
from pretrain.checkpoints.run import (
    check_branch,
    check_length,
    check_resume,
    check_settings,
    finished_result,
    list_checkpoints,
    load_run_settings,
    run_and_length,
    steps_of,
)
from pretrain.config import (
    PixelOrder,
    PretrainSettings,
    SinkName,
    check_against_ranks,
    check_installed,
    parse_length,
)
from pretrain.data.datasets import StreamData, TrainingData, check_against_data, load_training_data
from pretrain.engine.zero_cost import NUM_STATES
from pretrain.models.imported import allow_import, code_of
from pretrain.models.spec import ModelSpec
from pretrain.ranks.launch import LAUNCHED_WITH, launch
from pretrain.ranks.preemption import StopFlag
from pretrain.ranks.world import World, free_port, rank_of, read_alone, read_world

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: list[str] | None = None) -> int:
    return run_command("pretrain", make_parser().parse_args(arguments), rank=rank_of())


def make_parser() -> Parser:
    parser = program(
        "pretrain",
        description="Pretrain all-MLP vision models with DeepSpeed ZeRO.",
        add_verbs=_add_verbs,
    )
    # the `deepspeed` launcher passes this option, but only LOCAL_RANK is read
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    return parser


def _add_verbs(verbs: Verbs) -> None:
    recommend.add_verb(verbs)
    train = _add_config(verbs, "train", _train, help="train from a config, or resume a run")
    train.epilog = """pretrain train configs/pretrain/demo_mlp.yaml dataset=data/mine run_dir=runs/mine epochs=20
pretrain train configs/pretrain/demo_mlp.yaml --ranks 2 dataset=data/mine run_dir=runs/mine lr=3e-4 precision=fp32
pretrain train runs/mine
pretrain train runs/mine epochs=40"""  # noqa: E501 (a table)
    train.add_argument(
        "--ranks",
        type=at_least(1),
        help="start this many local ranks (torchrun and srun work as well)",
    )
    train.set_defaults(show=False)
    preview = _add_config(verbs, "preview", _preview, help="save a sheet of input images")
    example = "configs/pretrain/demo_mlp.yaml dataset=data/mine mixup_alpha=0.8 --out preview.png"
    preview.epilog = f"pretrain preview {example}"
    out = Path("preview.png")
    preview.add_argument("--out", type=Path, default=out, help="PNG file (default: preview.png)")
    count = "number of images (default: 64)"
    preview.add_argument("--count", type=at_least(1), default=64, help=count)
    epoch = "epoch whose first images are drawn (default: 0)"
    preview.add_argument("--epoch", type=at_least(0), default=0, help=epoch)
    models = verbs.add_parser(
        "models", help="list the named models with their parameters, MACs and widths"
    )
    models.add_argument(
        "--classes",
        type=at_least(1),
        help="classes of the head (default: 1000, or 10 for the models of small datasets)",
    )
    models.add_argument(
        "--image-size", type=at_least(1), help="image size in pixels (default: the model's own)"
    )
    models.add_argument(
        "--match", default="*", metavar="GLOB", help="list only matching names, e.g. 'mixer_*'"
    )
    models.epilog = "pretrain models --match 'mixer_*'"
    models.set_defaults(run=_models)
    words = "estimate a model's memory and time per step, and the fastest number of nodes"
    _add_estimate(verbs.add_parser("estimate", help=words))
    sync = verbs.add_parser(
        "sync",
        help="send a run's undelivered events to MLflow, or write its events for another tool",
    )
    sync.epilog = "pretrain sync runs/mine"
    sync.add_argument("run_dir", type=Path, help="directory of the run")
    tools = ("mlflow", *get_args(SinkName))
    sync.add_argument("--to", choices=tools, default="mlflow", help="the tool (default: mlflow)")
    sync.set_defaults(run=_sync)
    ui = verbs.add_parser("ui", help="show the runs of a folder in MLflow's web page")
    ui.epilog = "pretrain ui runs"
    ui.add_argument("folder", type=Path, help="folder of the runs, with mlflow.db")
    host = "address or name of this machine on the network (default: 127.0.0.1, local only)"
    ui.add_argument("--host", default="127.0.0.1", help=host)
    ui.add_argument("--port", type=at_least(1), help="port of the page (default: a free port)")
    ui.set_defaults(run=_ui)


def _add_config(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=help)
    verb.add_argument(
        "config",
        help="YAML file, for example configs/pretrain/demo_mlp.yaml, or directory of a run",
    )
    verb.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="setting to change, for example optimizer.lr=1e-4, or short lr=1e-4",
    )
    verb.set_defaults(run=run, schema="pretrain.config:PretrainSettings")
    return verb


def _add_estimate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", help="name from `pretrain models`, or a config of `pretrain train`")
    verb.add_argument("overrides", nargs="*", default=[], help="settings to change, as key=value")
    nodes = "numbers of nodes to compare (default: 1,2,4,8,16,32)"
    verb.add_argument("--nodes", default="1,2,4,8,16,32", help=nodes)
    counts: dict[str, tuple[int | None, str]] = {
        "batch": (None, "global batch size (default: from the config, or 4096)"),
        "samples": (None, "samples per epoch (default: from the config's dataset)"),
        "gpus": (4, "GPUs per node (default: 4)"),
        "classes": (None, "classes of the head (default: from the dataset or model)"),
        "image-size": (None, "image size in pixels (default: from the config or model)"),
        "micro-batch": (None, "samples per GPU and pass (default: from the config, or all)"),
        "internode-gbps": (200, "network bandwidth per node in Gbit/s (default: 200)"),
        "intranode-gbps": (3600, "bandwidth between GPUs of a node in Gbit/s (default: 3600)"),
        "teraflops": (300, "TFLOP/s that each GPU achieves (default: 300)"),
    }
    for name, (default, meaning) in counts.items():
        verb.add_argument(f"--{name}", type=at_least(1), default=default, help=meaning)
    verb.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="precision of the passes (default: from the config, or bf16)",
    )
    verb.add_argument(
        "--optimizer",
        choices=("lion", "sgd", "adamw"),
        help="optimizer whose memory is counted (default: from the config, or lion)",
    )
    stage = "ZeRO stage of the step time (default: from the config, or 1)"
    verb.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help=stage)
    verb.epilog = "pretrain estimate mlp_b12_wi1024 --batch 16384 --nodes 1,4,32"
    verb.description = (
        "Estimate memory and time of a step for each ZeRO stage, and the best number of nodes. For"
        " a config, also estimate a lower bound of the GPU-hours."
    )
    verb.set_defaults(run=_estimate)


def world_of(options: argparse.Namespace) -> World:
    count = options.ranks
    return World(0, 0, num_ranks=count, num_local_ranks=count) if count else read_world()


def ranks_of(world: World) -> str:
    return f"{world.num_ranks} rank{'s' * (world.num_ranks > 1)}"


def warn_if_enlarged(data: TrainingData, run_dir: str) -> None:
    stored = data.parts[0].stored_size(data.image_size)
    if stored < data.image_size:
        problem = f"images are stored with {stored} px and enlarged to {data.image_size} px"
        print(f"{run_dir}: {problem}", flush=True)


def _train(options: argparse.Namespace) -> int:
    if not options.ranks:
        StopFlag().install()  # before the slow imports, to catch a signal during them
    settings = load_run_settings(PretrainSettings, path=options.config, overrides=options.overrides)
    if options.show:
        return show(settings)
    run_dir, world = Path(settings.run_dir), world_of(options)
    allow_import(getattr(settings.model, "path", None))
    code_of(settings.model)  # fails early if the package does not exist
    check_settings(run_dir, settings)
    fetch_run(settings, world)
    if (result := finished_result(run_dir, settings)) is not None:
        if world.is_first:
            fix = "Raise train.duration to continue, or choose another run_dir"
            print(f"{run_dir}: finished before, at step {result['step']}. {fix}")
        return OK
    data = load_training_data(settings.data)
    check_against_data(data, settings)
    check_length(data, settings)
    check_resume(run_dir, settings.resume)
    check_against_ranks(settings.train, settings.augment, num_ranks=world.num_ranks)
    if isinstance(data, StreamData):
        data.check_ranks(world.num_ranks)
    start = _start_of(settings, data, world)
    if options.ranks or (world.is_first and LAUNCHED_WITH not in os.environ):
        engine = settings.engine
        how = f"{ranks_of(world)}, ZeRO {engine.zero_stage}, {engine.precision}"
        what = f"{settings.model.label} on {how}; loading DeepSpeed takes some seconds"
        print(f"{settings.run_dir}: starting {what}", flush=True)
        if isinstance(data, StreamData):
            print(f"{settings.run_dir}: {data.in_words}", flush=True)
        warn_if_enlarged(data, settings.run_dir)
        if not world.is_one_node and (data.is_remote or settings.data.stage_dir):
            num_nodes = world.num_ranks // world.num_local_ranks
            print(f"{settings.run_dir}: {data.reading_in_words(num_nodes)}", flush=True)
    if options.ranks:
        command = [sys.executable, "-m", "pretrain", "train", options.config, *options.overrides]
        return launch(command, num_ranks=options.ranks, heed_signals=True)
    options.started = True
    from pretrain.loop.train import Pretraining, summary, train

    outcome = train(Pretraining(settings, data, start), world)
    more = summary(outcome, run_dir, data) if outcome.finished else []
    return leave(outcome.finished, run_dir=run_dir, is_first=world.is_first, more=more)


def _start_of(settings: PretrainSettings, data: TrainingData, world: World) -> Checkpoint | None:
    """Return the checkpoint of `start_from`. Return None if `start_from` is not set or the run has
    its own checkpoints."""
    source = settings.start_from
    if source is None or list_checkpoints(Path(settings.run_dir)):
        return None
    found = Checkpoint.open(source, verify=world.local_rank == 0)
    card, is_branch = found.card, run_and_length(source)[1] != ""
    if is_branch:
        check_branch(source, settings)
        if (num_steps := steps_of(settings, data)) <= card.step:
            problem = f"{settings.train.duration} is {num_steps:,} steps, but {source} is at step"
            fix = "set a longer duration"
            raise SettingsError("train.duration", f"{problem} {card.step:,}", fix, code="bad-value")
    there = _facts_of_weights(card.model, card.image_size, card)
    here = _facts_of_weights(settings.model, data.image_size, settings.data)
    if differ := differences(there, here, is_free=lambda key, old, new: key == "model.dropout"):
        problem = f"the model differs from the model in {source} ({differ})"
        fix = "set the same model, or choose another source"
        raise SettingsError("start_from", problem, fix, code="mismatch")
    if world.is_first and LAUNCHED_WITH not in os.environ:
        taken = "with the head" if card.classes == data.classes else "without the head"
        if is_branch:
            taken = "with the optimizer and the position in the data"
        print(f"{settings.run_dir}: begins with the weights of {found.directory}, {taken}")
        for part in data.parts:
            if warning := card.other_pixels(part.manifest, dataset=str(part.directory)):
                print(f"pretrain: {warning}", file=sys.stderr)
    return found


def _facts_of_weights(model: ModelSpec, image_size: int, pixels: PixelOrder) -> dict[str, Any]:
    """Return the facts that weights and a run that begins with them must share."""
    return {
        "model": model.model_dump(mode="json"),
        "image_size": image_size,
        "data.pixel_permutation": pixels.pixel_permutation,
    }


def leave(finished: bool, *, run_dir: Path | None, is_first: bool, more: Sequence[str] = ()) -> int:
    """Exit this process at once. Its heartbeat has ended, so other ranks would not notice a later
    crash.

    A stopped run also exits with 0, because result.json shows whether the run is finished. SLURM
    does not read result.json. In a SLURM job, the first rank of a stopped run therefore exits with
    130, so that jobs with --dependency=afterok do not begin. The other ranks exit with 0, because
    some sites kill a job step at its first bad exit.
    """
    if is_first and run_dir is not None:
        stopped = "stopped with a checkpoint. Run the same command to resume"
        if not list_checkpoints(run_dir):
            stopped = "stopped before its first checkpoint. The same command restarts it"
        print("\n".join([f"{run_dir}: {'finished' if finished else stopped}", *more]))
    sys.stdout.flush()
    sys.stderr.flush()
    code = OK if finished or not is_first or "SLURM_JOB_ID" not in os.environ else INTERRUPTED
    # after gloo, interpreter shutdown sometimes crashes in a destructor (SEEN: 7 of 37 runs)
    os._exit(code)


def _preview(options: argparse.Namespace) -> int:
    from data_prep.images.sheet import check_out, save_sheet

    check_out(options.out)
    settings = load_run_settings(PretrainSettings, path=options.config, overrides=options.overrides)
    data = load_training_data(settings.data)  # before torch, to report errors early
    with doing("loading torch"):
        from pretrain.loop.preview import preview

    sheet = preview(
        settings, data, count=options.count, epoch=options.epoch, num_threads=read_alone().num_cores
    )
    save_sheet(sheet, options.out)
    print(f"{options.out}: {options.count} images, {sheet.width} x {sheet.height} pixels")
    return OK


def console() -> "Console":
    """Return a console as wide as the terminal, but at least 100 columns wide."""
    from rich.console import Console

    return Console(width=max(shutil.get_terminal_size((120, 24)).columns, 100), highlight=False)


def _models(options: argparse.Namespace) -> int:
    from pretrain.models.listing import list_models, print_models

    rows, unfit = list_models(
        match=options.match, num_classes=options.classes, image_size=options.image_size
    )
    print_models(rows, unfit, console())
    return OK


def _estimate(options: argparse.Namespace) -> int:
    from pretrain.data.order import epoch_length
    from pretrain.engine.zero_cost import Cluster, Plan, in_hours, plan_of, print_plan
    from pretrain.models.cost import cost_of
    from pretrain.models.listing import parse_numbers
    from pretrain.models.presets import preset, spec_of

    num_nodes = parse_numbers(options.nodes, field="--nodes")
    gbps = (options.internode_gbps, options.intranode_gbps)
    cluster = Cluster(options.gpus, *gbps, options.teraflops)
    classes, size, samples = options.classes, options.image_size, options.samples
    settings = data = None
    if options.model.endswith((".yaml", ".yml")):
        settings = load_settings(PretrainSettings, path=options.model, overrides=options.overrides)
        size = size or settings.data.image_size
        if not (samples and classes and size):
            try:
                data = load_training_data(settings.data)
            except UserError as error:
                error.fix = f"{error.fix} (or give --samples, --classes and --image-size)".strip()
                raise
            samples = samples or data.num_samples
            classes = classes or len(data.classes)
            size = size or data.image_size
        plan = plan_of(settings, cluster, num_classes=classes, image_size=size)
    else:
        known = preset(options.model)
        cost = cost_of(
            spec_of(options.model),
            num_classes=classes or known.num_classes,
            image_size=size or known.image_size,
        )
        plan = Plan(cost, options.batch or 4096, cluster)
    plan = replace(
        plan,
        global_batch_size=options.batch or plan.global_batch_size,
        precision=options.precision or plan.precision,
        num_states=NUM_STATES.get(options.optimizer, plan.num_states),
        stage=plan.stage if options.zero is None else options.zero,
        micro_batch_size=options.micro_batch or plan.micro_batch_size,
    )
    wrong = [count for count in num_nodes if plan.global_batch_size % (count * options.gpus)]
    if wrong:
        raise UserError(
            "--batch",
            f"{plan.global_batch_size} is not divisible by {wrong[0]} nodes x {options.gpus} GPUs",
            "choose another --batch, or other --nodes",
            code="bad-value",
        )
    if not plan.cost.multiply_adds:
        problem, fix = "the model's cost is not known", "choose a model from `pretrain models`"
        raise UserError("model", problem, fix, code="unsupported")
    print_plan(plan, num_nodes, console())
    if data is not None and not data.settings.stream:
        for count in num_nodes:
            console().print(data.reading_in_words(count))
    if settings is not None:
        samples = epoch_length(
            samples, global_batch_size=plan.global_batch_size, last_batch=settings.data.last_batch
        )
        num_steps = parse_length(settings.train.duration).steps(
            global_batch_size=plan.global_batch_size, num_samples=samples
        )
        console().print(
            f"{num_steps:,} steps take at least {in_hours(plan.gpu_hours(num_steps))} GPU-hours, if"
            f" each GPU computes at {options.teraflops:g} TFLOP/s without pause"
        )
    return OK


def _sync(options: argparse.Namespace) -> int:
    if not (options.run_dir / "tracking" / "identity.json").exists():
        problem = "the directory is not a run with an event log"
        raise UserError(
            str(options.run_dir), problem, "Give the directory of a run", code="wrong-command"
        )
    if options.to != "mlflow":
        check_installed(options.to)
        from pretrain.tracking.delivery import write_sinks

        count = write_sinks(options.run_dir, options.to)
        print(f"{options.run_dir / 'tracking' / options.to}: {count:,} events were written")
        return OK
    with doing("loading MLflow"):
        from pretrain.tracking.delivery import sync

    print(
        f"{options.run_dir}: {sync(options.run_dir):,} bytes of the event log were sent to MLflow"
    )
    return OK


def _ui(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        fix = near_path(options.folder) or "Give the folder of the runs"
        raise UserError(str(options.folder), "the path is not a folder", fix, code="missing-path")
    try:
        port = options.port or free_port(options.host)
    except OSError as error:
        problem = f"{options.host} is not a name of this machine ({error.strerror})"
        raise UserError(
            "--host", problem, "Use the name that `hostname -f` prints", code="bad-value"
        ) from None
    with doing("loading MLflow"):
        from pretrain.tracking.server import serve

    options.started = True
    serve(options.folder, host=options.host, port=port)
    return OK
