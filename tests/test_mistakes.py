"""Every mistake in a config, a path or an argument is one line that names it and the remedy, before anything heavy is imported.

The tables are the specification: what is typed, and the words that must be said. Each row runs in a fork of one light process.
"""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from data_prep.cli import main as data_prep
from data_prep.settings import dump, load_settings
from pretrain.checkpoints.card import ModelCard, config_of
from pretrain.cli import main as pretrain
from pretrain.config import PretrainSettings
from tests.conftest import Capture
from tests.data_prep.samples import write_classes
from tests.light import Light
from tests.ranks import REPOSITORY

MOST_CPU_S = 0.6
"""Of a row, besides what our own modules take to be imported; a row takes a twentieth of it."""


@pytest.fixture(scope="module")
def light() -> Iterator[Light]:
    server = Light()
    yield server
    server.close()


def check(
    light: Light, place: Path, words: list[str], complaint: str, *, limited: bool = True
) -> None:
    """One line, with the remedy; `limited`: at no cost, for no data need be read."""
    answer = light.run(place, *words)
    assert answer.code == (1 if words[0] == "cluster/doctor" else 2) and complaint in answer.said, (
        answer
    )
    if not limited:
        answer = answer._replace(said=answer.said.removeprefix("loading torch\n"))
    assert "\n" not in answer.said and "Traceback" not in answer.said, answer
    assert not limited or (answer.heavy == [] and answer.cpu_s < MOST_CPU_S), answer


PRETRAIN = """
run_dir: runs/x
data: {dataset: DATASET}
model: {kind: mlp, depth: 2, width: 8}
train: {duration: 2 epochs, global_batch_size: 24}
"""
STREAM = "stream: true, num_classes: 9, samples_per_epoch: 24, image_size: 16"

TABLE = [
    ("section misspelt", ["optimiser.lr=1"], "optimiser: unknown key; did you mean 'optimizer'?"),
    ("key misspelt", ["optimizer.weight_decy=0.1"], "optimizer.weight_decy: unknown key; did you mean 'weight_decay'?"),
    ("key of the model", ["model.widht=3"], "model.widht: unknown key; did you mean 'width'?"),
    ("key of the other model", ["model.patch_size=4"], "model.patch_size: unknown key"),
    ("text for a number", ["optimizer.lr=fast"], "optimizer.lr: 'fast' will not do; a number is needed"),
    ("fraction for a whole number", ["train.global_batch_size=24.5"], "train.global_batch_size: 24.5 will not do; a whole number"),
    ("quoted number", ['train.seed="3"'], "train.seed: '3' will not do; a whole number is needed"),
    ("yes for true", ["engine.compile=yes"], "engine.compile: 'yes' will not do; true or false is needed"),
    ("negative", ["optimizer.lr=-1"], "optimizer.lr: -1 will not do; it must be greater than 0"),
    ("not finite", ["optimizer.lr=.inf"], "optimizer.lr:"),
    ("unknown optimizer", ["optimizer.name=lyon"], "optimizer.name: 'lyon' is not one of its values; did you mean 'lion'?"),
    ("other case", ["LR=1"], "LR: unknown key; did you mean 'optimizer.lr'?"),
    ("other case of a word", ["precision=FP32"], "engine.precision: 'FP32' is not one of its values; did you mean 'fp32'?"),
    ("a part of a key", ["batch_size=8"], "batch_size: unknown key; did you mean 'train.global_batch_size' or 'train.local_batch_size'?"),
    ("name of an optimizer alone", ["optimizer=adamw"], "optimizer: 'adamw' will not do, for it is a section; write optimizer.name=adamw"),
    ("nothing", ["lr="], "optimizer.lr: null will not do; a number is needed"),
    ("unknown stage", ["engine.zero_stage=4"], "engine.zero_stage: 4 is not one of its values; known: 0, 1, 2, 3"),
    ("unknown kind of model", ["model.kind=mxer"], "model.kind: 'mxer' is not one of its values; did you mean 'mixer'?"),
    ("unknown preset", ["model={preset: mlp_b12_wi1042}"], "model.preset: 'mlp_b12_wi1042' is not a known model; did you mean 'mlp_b12_wi1024'?"),
    ("a list for a preset", ["model={preset: [mixer_b_w]}"], "model.preset: ['mixer_b_w'] is not a known model; did you mean 'mixer_b_w'?"),
    ("preset on top of a model", ["model.preset=mixer_ss_w"], "model.preset: 'mixer_ss_w' is given beside kind 'mlp', which are two models; for the named one write model='{preset: mixer_ss_w}', or remove kind"),
    ("offload of what is not sharded", ["engine.zero_stage=0", "engine.offload=optimizer"], "engine.offload: 'optimizer' needs engine.zero_stage 1"),
    ("best of nothing", ["checkpoint.keep_best=true", "data.eval_split=null"], "checkpoint.keep_best: true will not do with data.eval_split null"),
    ("mirror that nobody can write", ["checkpoint.mirror=https://host/run"], "checkpoint.mirror: 'https' will not do; write s3://BUCKET/RUN, or gs, az, file in the place of s3"),
    ("secrets in an address", ["checkpoint.mirror=s3://key:secret@bucket/run"], "checkpoint.mirror: s3://bucket/run: holds a password, which would stand in records; give credentials in checkpoint.mirror_storage"),
    ("a user in an address", ["checkpoint.mirror=s3://secret@bucket/run"], "checkpoint.mirror: s3://bucket/run: holds a password"),
    ("a query of a mirror", ["checkpoint.mirror=gs://bucket/run?version"], "checkpoint.mirror: no more than an address belongs here"),
    ("a token in a stream", ["data.dataset=a.tar::https://host/a-{0..3}.tar?token=hush"], "data.dataset: https://host/a-{0..3}.tar: holds token, which would stand in records; give it in data.storage"),
    ("a password of another dataset", ["data.also=[{dataset: 'https://me:hush@host/more'}]"], "data.also.0.dataset: https://host/more: holds a password, which would stand in records"),
    ("a tracking server's password", ["tracking.uri=https://me:hush@host"], "tracking.uri: https://host: holds a password, which would stand in records; set MLFLOW_TRACKING_USERNAME"),
    ("a secret for options", ["checkpoint.mirror_storage=secret"], "checkpoint.mirror_storage: will not do; a section"),
    ("a secret in what is no YAML", ["data.storage={key: secret]"], "override data.storage: what follows is not valid YAML"),
    ("options of no mirror", ["checkpoint.mirror_storage={key: me}"], "checkpoint.mirror_storage: there is no mirror; set checkpoint.mirror, or leave it out"),
    ("options of a mirror that is left out", ["checkpoint.mirror_storage={key: me}", "checkpoint.mirror=null", "data.dataset=nowhere"], "nowhere: no such dataset"),
    ("evaluation never", ["train.eval_every=0 steps"], "train.eval_every: '0 steps' is never; write how often"),
    ("duration without unit", ["train.duration=90"], "train.duration:"),
    ("duration with a wrong unit", ["train.duration=90 hours"], "train.duration: '90 hours' is not a length; write a number and a unit"),
    ("half a step", ["train.duration=1.5 steps"], "train.duration: '1.5 steps' is not a whole number of steps"),
    ("rising cosine", ["schedule.final_lr=1"], "schedule.final_lr: 1.0 is above optimizer.lr"),
    ("rising straight line", ["schedule={name: linear, final_lr: 1}"], "schedule.final_lr: 1.0 is above optimizer.lr 0.0001; linear falls"),
    ("constant that ends elsewhere", ["schedule={name: constant, final_lr: 1e-5}"], "schedule.final_lr: 1e-05 changes nothing with constant"),
    ("warm-up from above", ["schedule={warmup: 1 epochs, warmup_from: 1e-3}"], "schedule.warmup_from: 0.001 is above optimizer.lr 0.0001; a warm-up rises"),
    ("start of no warm-up", ["schedule.warmup_from=1e-6"], "schedule.warmup_from: 1e-06 changes nothing without a warm-up; set schedule.warmup"),
    ("unknown size of a micro-batch", ["train.local_batch_size=aut"], "train.local_batch_size: 'aut' will not do; give a whole number of at least 1, or auto"),
    ("no micro-batch", ["train.local_batch_size=0"], "train.local_batch_size: 0 will not do; give a whole number of at least 1, or auto"),
    ("half a sample", ["train.local_batch_size=1.5"], "train.local_batch_size: 1.5 will not do; give a whole number"),
    ("odd share for auto with MixUp", ["augment.mixup_alpha=0.8", "train.local_batch_size=auto", "train.global_batch_size=6", "--ranks", "2"], "train.local_batch_size: 3 on 2 ranks is odd, but MixUp pairs neighbours"),
    ("momentum for lamb", ["optimizer={name: lamb, momentum: 0.8}"], "optimizer.momentum: 0.8 changes nothing with lamb; set optimizer.betas"),
    ("local batch does not divide", ["train.local_batch_size=5"], "train.local_batch_size: 5 does not divide global_batch_size 24; the nearest that does is 4"),
    ("batch does not split over ranks", ["train.global_batch_size=25", "--ranks", "2"], "train.global_batch_size: 25 does not split over 2 ranks; the nearest that does is 24 or 26"),
    ("local batch too large for the ranks", ["train.local_batch_size=24", "--ranks", "2"], "train.local_batch_size: 24 does not divide a rank's share of 12"),
    ("odd batch with MixUp", ["augment.mixup_alpha=0.8", "train.local_batch_size=3"], "train.local_batch_size: 3 is odd, but MixUp pairs neighbours"),
    ("odd batch with CutMix", ["augment.cutmix_alpha=1.0", "train.local_batch_size=3"], "train.local_batch_size: 3 is odd, but CutMix pairs neighbours; make it even, or set augment.cutmix_alpha=0"),
    ("odd batch with both", ["augment={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.local_batch_size=3"], "train.local_batch_size: 3 is odd, but MixUp and CutMix pair neighbours; make it even, or set augment.mixup_alpha=0 augment.cutmix_alpha=0"),
    ("odd share of a rank with CutMix", ["augment.cutmix_alpha=1.0", "train.global_batch_size=6", "--ranks", "2"], "train.local_batch_size: 3 on 2 ranks is odd, but CutMix pairs neighbours; make it even"),
    ("unknown policy", ["augment.auto_augment=orginal"], "augment.auto_augment: 'orginal' is not a policy; did you mean 'original'?"),
    ("policy that is true", ["augment.auto_augment=true"], "augment.auto_augment: True will not do; text is needed"),
    ("two ways to crop", ["augment={crop_scale: [0.4, 1.0], crop_padding: 4}"], "augment.crop_padding: 4 will not do with crop_scale [0.4, 1.0], which crops too; set crop_padding=0 or crop_scale=null"),
    ("crop range upside down", ["augment.crop_scale=[0.9, 0.1]"], "augment.crop_scale: [0.9, 0.1] will not do; write [low, high]"),
    ("crop range too short", ["augment.crop_scale=[0.9]"], "augment.crop_scale.1: missing"),
    ("probability above one", ["augment.flip_probability=1.5"], "augment.flip_probability: 1.5 will not do; it must be less than or equal to 1"),
    ("augmentation behind no order of pixels", ["data.permute=before"], "data.permute: before changes nothing without an order; set data.pixel_permutation, such as 0"),
    ("betas for sgd", ["optimizer={name: sgd, lr: 0.1, betas: [0.9, 0.9]}"], "optimizer.betas: sgd has none; set optimizer.momentum"),
    ("betas out of range", ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas: [0.9, 1.0] will not do"),
    ("graphs of nothing", ["engine.cuda_graphs=true"], "engine.cuda_graphs: true needs engine.compile=true and engine.zero_stage=0; set both"),
    ("compile at stage 3", ["engine={compile: true, zero_stage: 3}"], "engine.compile: true will not do with engine.zero_stage 3"),
    ("patch of a sparse MLP does not divide", ["model={kind: sw_mlp, patch_size: 5}"], "model.patch_size: 5 does not divide image size 16; the nearest that does is 4"),
    ("patch of a transformer does not divide", ["model={preset: vit_b_4}", "data.image_size=18"], "model.patch_size: 4 does not divide image size 18; the nearest that does is 3"),
    ("no such block", ["model={kind: mixer, depth: 2, permuted_blocks: [2]}"], "model.permuted_blocks: there is no block 2; with depth 2 give numbers from 0 to 1, or all"),
    ("blocks by a wrong word", ["model={kind: mixer, permuted_blocks: some}"], "model.permuted_blocks: 'some' will not do; give block numbers such as [0, 3], or all"),
    ("hidden width without a hidden layer", ["model={kind: mixer, layers_per_mixing: 1, token_hidden: 9}"], "model.layers_per_mixing: 1 leaves nothing hidden; remove token_hidden and channel_hidden, or set 2"),
    ("expansion beside hidden widths", ["model={kind: mixer, expansion: 2.0, token_hidden: 8, channel_hidden: 8}"], "model.expansion: 2 changes nothing with token_hidden and channel_hidden; leave it at 4"),
    ("expansion of one layer", ["model={kind: mixer, layers_per_mixing: 1, expansion: 2.0}"], "model.expansion: 2 changes nothing with layers_per_mixing 1; leave it at 4"),
    ("expansion without a bottleneck", ["model={kind: mlp, bottleneck: none, expansion: 2.0}"], "model.expansion: 2 changes nothing with bottleneck none; leave it at 4"),
    ("name of a model alone", ["model=mixer_b_w"], "model: 'mixer_b_w' will not do; for a named model write model='{preset: mixer_b_w}'"),
    ("fewer connections than neurons", ["model={kind: sw_mlp, width: 50, density: 0.01}"], "model.density: 0.01 leaves most of 50 entries without a connection; give 0.02 or more"),
    ("no such split", ["data.eval_split=vall"], "data.eval_split: DATASET: has no split 'vall'; did you mean 'val'?"),
    ("no such dataset", ["data.dataset=nowhere"], "nowhere: no such dataset directory; make it with data_prep build"),
    ("dataset of a mixture without its section", ["data.also=[somewhere]"], "data.also.0: 'somewhere' will not do; a section"),
    ("mixture without a dataset", ["data.also=[{split: train}]"], "data.also.0.dataset: missing; set it"),
    ("no such split to mix", ["data.also=[{dataset: DATASET, split: trian}]"], "data.also.0.split: DATASET: has no split 'trian'; did you mean 'train'?"),
    ("weight alone", ["data.weight=2.0"], "data.weight: stands alone; it weighs `dataset` against those of data.also"),
    ("one weight of two", ["data={dataset: DATASET, weight: 1, also: [{dataset: DATASET}]}"], "data.weight: give one to `dataset` and to each of data.also, or to none"),
    ("weight that vanishes", ["data={dataset: DATASET, weight: 1e-7, also: [{dataset: DATASET, weight: 1}]}"], "data.weight: 1e-07 will not do; it must be greater than or equal to 0.000001"),
    ("weights that differ by nothing", ["data={dataset: DATASET, weight: 999.999999, also: [{dataset: DATASET, weight: 999.999998}, {dataset: DATASET, weight: 999.999997}]}"], "data.weight: shares of 999999999 : 999999998 : 999999997 are too fine; give weights with fewer digits"),
    ("mixture that drops", ["data={dataset: DATASET, last_batch: drop, also: [{dataset: DATASET}]}"], "data.last_batch: 'drop' will not do with data.also"),
    ("stream without its classes", ["data={dataset: DATASET/train-000000.tar, stream: true, samples_per_epoch: 9}"], "data.num_classes: missing; nothing else says it of a stream: set data.num_classes, such as 1000"),
    ("classes of no stream", ["data.num_classes=4"], "data.num_classes: changes nothing without a stream; set data.stream=true"),
    ("stream that is to be evaluated", ["data={STREAM, dataset: DATASET/train-000000.tar}"], "data.eval_split: val will not do with data.eval_dataset null: a stream has no splits"),
    ("stream with staged copies", ["data={STREAM, dataset: x.tar, stage_dir: /x}"], "data.stage_dir: will not do with data.stream; leave it out"),
    ("stream of an indexed dataset", ["data={STREAM, dataset: DATASET, eval_split: null}"], "data.dataset: DATASET is an indexed dataset; leave data.stream out"),
    ("stream of a pattern", ["data={STREAM, dataset: 'DATASET/*.tar', eval_split: null}"], "data.dataset: 'DATASET/*.tar' is no file; correct the list (a range is {000..146}, not *), or put it there"),
    ("stream of an unknown scheme", ["data={STREAM, dataset: 'gopher://x/a.tar', eval_split: null}"], "data.dataset: gopher: is not read; write a path, a URL, or a command as 'pipe:COMMAND'"),
    ("stream of a variable that is not set", ["data={STREAM, dataset: '${ROOT}/a.tar', eval_split: null}"], "data.dataset: ${ROOT} stands for WDS_ROOT, which is not set"),
    ("stream with other classes than its evaluation", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_dataset: DATASET}"], "data.num_classes: 9, but DATASET has 8; set that"),
    ("fewer shards than ranks", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_split: null}", "--ranks", "3"], "data.dataset: 1 shard for 3 ranks, of which each reads its own; cut them into more"),
    ("mixing across the ranks of a stream", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_split: null}", "augment={mixup_alpha: 0.8, mix_with: previous}"], "augment.mix_with: 'previous' will not do with data.stream"),
    ("a batch that drop never fills", ["data.last_batch=drop", "train.global_batch_size=512"], "train.global_batch_size: 512 is more than the 240 samples of an epoch. Set it to at most 240, such as 128"),
    ("a batch of more than there is", ["train.global_batch_size=248"], "train.global_batch_size: 248 is more than the 240 samples of an epoch"),
    ("section instead of value", ["optimizer.lr={a: 1}"], "optimizer.lr:"),
    ("value instead of section", ["optimizer=3"], "optimizer: 3 will not do; a section (key: value lines) is needed"),
    ("override into a value", ["run_dir.x=3"], "override 'run_dir.x=3': run_dir is the value 'runs/x', not a section"),
    ("broken YAML in an override", ["augment.crop_scale=[0.9"], "'[0.9' is not valid YAML; quote it"),
    ("resume that cannot be", ["resume=must"], "resume: 'must', but runs/x has no checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_bad_pretraining_config_is_one_line_with_its_remedy(
    shapes: Path, tmp_path: Path, overrides: list[str], words: str, light: Light
) -> None:
    (tmp_path / "c.yaml").write_text(PRETRAIN.replace("DATASET", str(shapes)))
    overrides = [
        words.replace("STREAM", STREAM).replace("DATASET", str(shapes)) for words in overrides
    ]
    start = "" if words.startswith("'") else "pretrain: "
    check(
        light,
        tmp_path,
        ["pretrain", "train", "c.yaml", *overrides],
        start + words.replace("DATASET", str(shapes)),
    )


FILES = [
    ("not YAML", b"a: [1", "not valid YAML"),
    ("a list", b"- 1\n- 2", "a config is a mapping of sections"),
    ("doubled key", b"run_dir: a\nrun_dir: b", "the key 'run_dir' stands twice"),
    ("nothing", b"", "missing; set it in the config or as"),
    ("bytes", b"\xff\xfe\x00", "cannot be read as a text file"),
]


@pytest.mark.parametrize(
    ("text", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_a_bad_config_file_is_named(
    tmp_path: Path, text: bytes, words: str, capsys: Capture
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    assert pretrain(["train", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert pretrain(["train", str(tmp_path / "mime.yaml")]) == 2
    assert "no such config file; did you mean" in capsys.readouterr().err


PROBE = "run_dir: runs/p\npretrained: null\ndata: {dataset: DATASET}\n"
TUNE = (
    "run_dir: runs/t\npretrained: RUN\ndata: {dataset: DATASET}\ntrain: {duration: 1 epochs,"
    " global_batch_size: 8}\n"
)
LATER = [
    (
        "probe",
        ["test_split=train"],
        "data.test_split: 'train' is the training split too; test on another",
    ),
    ("probe", ["lrs=[]"], "lrs: [] has the wrong number of entries"),
    (
        "probe",
        ["lrs=[0.1, -1]"],
        "lrs: [0.1, -1.0] will not do; every learning rate must be above 0",
    ),
    ("probe", ["pretrained=nowhere"], "nowhere: is not there; give a run directory"),
    ("probe", ["holdout_share=1.5"], "holdout_share: 1.5 will not do"),
    ("probe", ["test_split=vall"], "has no split 'vall'; did you mean 'val'?"),
    ("probe", ["optimizer={name: sgd}"], "optimizer: {'name': 'sgd'} is not one of its values"),
    (
        "probe",
        ["optimizer=lbfgs", "lrs=[0.1, 0.2]"],
        "lrs: lbfgs does not use it. Set optimizer=lion",
    ),
    ("probe", ["features_dir=/proc/f"], "features_dir: /proc/f cannot be made"),
    (
        "tune",
        ["data={STREAM, dataset: x.tar, eval_split: null}"],
        "data.stream: true will not do for a tuning; index its shards (data_prep index)",
    ),
    ("tune", ["init=random"], "init: 'random' is not one of its values"),
    ("tune", ["seeds=3"], "seeds: 3 will not do; a list is needed, such as [0, 1, 2]"),
    (
        "tune",
        ["betas=0.9,0.99"],
        "optimizer.betas: '0.9,0.99' will not do; a list is needed, such as [0.9, 0.99]",
    ),
    (
        "tune",
        ["checkpoint.keep_best=true", "data.eval_split=null"],
        "checkpoint.keep_best: true will not do with data.eval_split",
    ),
    ("tune", [], "nowhere: is not there; give a run directory"),
    ("tune", ["engine.zero_stage=2"], "engine.zero_stage: unknown key"),
]


@pytest.mark.parametrize(("verb", "overrides", "words"), LATER)
def test_a_bad_transfer_config_is_one_line_with_its_remedy(
    shapes: Path, tmp_path: Path, verb: str, overrides: list[str], words: str, light: Light
) -> None:
    (tmp_path / "c.yaml").write_text(
        {"probe": PROBE, "tune": TUNE}[verb]
        .replace("DATASET", str(shapes))
        .replace("RUN", "nowhere")
    )
    overrides = [each.replace("STREAM", STREAM) for each in overrides]
    check(light, tmp_path, ["finetune", verb, "c.yaml", *overrides], words)


@pytest.fixture(scope="module")
def lab(shapes: Path, other_shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has about him, and mixes up."""
    lab = tmp_path_factory.mktemp("lab")
    write_classes(lab / "pics", {"ant": 3, "bee": 3})
    for name, target in {"shapes": shapes, "other": other_shapes}.items():
        (lab / name).symlink_to(target)
    of_pictures = [
        f"source.path={lab}/pics",
        "image_size=16",
        "num_workers=1",
        "source.val_share=0",
    ]
    assert data_prep(["build", "--source", "folder", f"--out={lab}/noval", *of_pictures]) == 0
    (lab / "empty").mkdir()
    shutil.copytree(lab / "pics" / "ant", lab / "flat")
    (lab / "unfinished" / "wide-mlps-parts").mkdir(parents=True)
    (lab / "points.csv").write_text("a,b\n1,2\n")
    (lab / "train.yaml").write_text(PRETRAIN.replace("DATASET", "shapes"))
    (lab / "probe.yaml").write_text(PROBE.replace("DATASET", "shapes").replace("null", "runs/m"))
    (lab / "tune.yaml").write_text(TUNE.replace("DATASET", "shapes").replace("RUN", "runs/m"))
    (lab / "knn.yaml").write_text(
        "run_dir: runs/k\npretrained: runs/m\nneighbours: [3]\ndata: {dataset: shapes}\n"
    )
    (lab / "build.yaml").write_text("source: {kind: folder, path: pics}\nout: x\n")
    (lab / "plan.yaml").write_text("pretrain: train.yaml\n")
    settings = load_settings(
        PretrainSettings, path=lab / "train.yaml", overrides=[f"run_dir={lab}/runs/m"]
    )
    names = tuple(f"class-{number}" for number in range(8))
    colours = {"channel_mean": (0.5, 0.5, 0.5), "channel_std": (0.2, 0.2, 0.2)}
    card = ModelCard(
        model=settings.model, image_size=16, classes=names, dataset="shapes", **colours
    )
    weights = lab / "runs" / "m" / "checkpoints" / "step-00000008"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text(json.dumps(config_of(card)))
    save_file({"stem.bias": np.zeros(3, np.float32)}, weights / "model.safetensors")
    (lab / "runs" / "m" / "config.yaml").write_text(dump(settings))
    return lab


MISTAKES = [
    ("pretrain", "pretrain: VERB missing; write pretrain VERB; pretrain --help explains"),
    ("pretrain trian train.yaml", "VERB: 'trian' is not one of them; did you mean 'train'?"),
    ("pretrain train.yaml", "'train.yaml' is not one of them; VERB comes first"),
    ("pretrain train", "config missing; write pretrain train CONFIG"),
    ("pretrain train trian.yaml", "no such config file; did you mean train.yaml?"),
    ("pretrain train run_dir=x", "is no config file, which comes before every key=value"),
    ("pretrain train train.yaml optimizer.lr", "override 'optimizer.lr': write it as key.path=value"),
    ("pretrain train train.yaml train.duration=30 steps", "override 'steps': write it as key.path=value, such as run_dir=runs/mine, and in quotes if it has spaces"),
    ("pretrain train train.yaml --optimizer.lr=1", "--optimizer.lr: no such option; pretrain train --help lists them; settings are written without dashes"),
    ("pretrain train train.yaml --rnaks 2", "--rnaks: no such option; did you mean --ranks?"),
    ("pretrain train train.yaml --ranks 0", "--ranks: '0' will not do; give a whole number from 1 up"),
    ("pretrain train train.yaml --ranks", "--ranks: expected one argument"),
    ("pretrain train runs/m lr=0.5", "(optimizer.lr: 0.5, was 0.0001); pretrain train runs/m resumes it with its own settings"),
    ("pretrain train runs", "is a directory, no config file"),
    ("pretrain train shapes/train-000000.tar", "cannot be read as a text file"),
    ("pretrain train probe.yaml", "probe.yaml: this is a config of finetune probe or finetune knn or finetune evaluate, not of pretrain train; run finetune probe probe.yaml"),
    ("pretrain train tune.yaml", "this is a config of finetune tune, not of pretrain train; run finetune tune tune.yaml"),
    ("pretrain train build.yaml", "this is a config of data_prep build, not of pretrain train; run data_prep build build.yaml"),
    ("pretrain train plan.yaml", "this is a config of cluster/submit, not of pretrain train; run cluster/submit plan.yaml"),
    ("pretrain show knn.yaml", "this is a config of finetune knn, not of pretrain train; run finetune knn knn.yaml"),
    ("pretrain train train.yaml data=shapes", "data: 'shapes' will not do, for it is a section; write data.dataset=shapes"),
    ("pretrain train train.yaml data.dataset=noval", "data.eval_split: noval: has no split 'val'; known: train; build it elsewhere with source.val_share=0.1, or do without: data.eval_split=null"),
    ("pretrain train train.yaml data.dataset=shaeps", "shaeps: no such dataset directory; did you mean shapes?"),
    ("pretrain train train.yaml data.dataset=pics", "pics: is a folder of pictures, no dataset yet; pretrain start pics makes one and a config, data_prep build --source folder --out DATASET source.path=pics makes it alone"),
    ("pretrain train train.yaml data.dataset=flat", "flat: is a folder of pictures, no dataset yet; pretrain start flat"),
    ("pretrain train train.yaml data.dataset=runs/m", "runs/m: is a run, or its weights, and no dataset; name the directory that data_prep build or index has written"),
    ("pretrain train train.yaml data.dataset=unfinished", "has no manifest.json, so it is unfinished; run its data_prep build again"),
    ("pretrain train train.yaml data.dataset=empty", "empty: holds no manifest.json, no shards and no pictures; name the directory"),
    ("pretrain train train.yaml data.dataset=.", ".: is no dataset itself; name one that is in it, such as noval"),
    ("pretrain train train.yaml data.dataset=shapes/manifest.json", "is a file of a dataset; name its directory, shapes"),
    ("pretrain train train.yaml data.dataset=shapes/train-000000.tar", "is a file, and a dataset is a directory; make one of the shard with data_prep index --train shapes/train-000000.tar --out DATASET"),
    ("pretrain train train.yaml run_dir=shapes", "run_dir: shapes is a dataset; name another run_dir"),
    ("pretrain train train.yaml run_dir=train.yaml", "run_dir: train.yaml cannot be made"),
    ("pretrain train train.yaml run_dir=/proc/x", "run_dir: /proc/x cannot be made, for /proc cannot be written to; name another run_dir"),
    ("pretrain train train.yaml run_dir=runs/m optimizer.lr=0.5", "belongs to a run with other settings (optimizer.lr: 0.5, was 0.0001"),
    ("pretrain preview train.yaml --out x.jpg", "out: x.jpg does not end in .png; name it x.png"),
    ("pretrain preview train.yaml --count 0", "--count: '0' will not do; give a whole number from 1 up"),
    ("pretrain preview train.yaml --epoch x", "--epoch: 'x' will not do; give a whole number"),
    ("pretrain plan mlp_b12_wi1024 --optimizer adam", "--optimizer: 'adam' is not one of them; did you mean 'adamw'?"),
    ("pretrain plan mlp_b12_wi1024 --nodes 3 --batch 4096", "--batch: 4096 does not split over 3 x 4 GPUs; choose another, or other --nodes"),
    ("pretrain models --match zzz", "--match: no model is named like 'zzz'; known:"),
    ("pretrain widths --omega x", "--omega: 'x' is not a positive number; write it as"),
    ("pretrain import nowhere.pth --out o", "nowhere.pth: is not there; give a file of weights"),
    ("pretrain import runs/m/checkpoints/step-00000008 --out o", "is a directory; give the file of weights in it, such as runs/m/checkpoints/step-00000008/model.safetensors"),
    ("pretrain import points.csv --out o --mean .5 .5 .5", "--mean and --std: one is given without the other; give both"),
    ("pretrain import points.csv --out o --classes nope.txt", "--classes: nope.txt cannot be read"),
    ("pretrain import points.csv --out o --activation swish", "--activation: 'swish' is not one of them; known: gelu, identity, relu, silu, tanh"),
    ("pretrain import points.csv --out pics", "out: pics exists and is not these weights; name another out"),
    ("pretrain sync shapes", "shapes: is not a run directory with a journal; give runs/NAME"),
    ("pretrain serve nowhere", "nowhere: is no folder; "),
    ("pretrain serve shapes --host 192.0.2.1", "--host: 192.0.2.1 is no name of this machine (Cannot assign requested address); see hostname -f"),
    ("pretrain start nowhere", "nowhere"),
    ("finetune probe train.yaml", "this is a config of pretrain train, not of finetune probe; run pretrain train train.yaml"),
    ("finetune tune probe.yaml", "this is a config of finetune probe or finetune knn or finetune evaluate, not of finetune tune; run finetune probe probe.yaml"),
    ("finetune probe runs/m", "config: runs/m is not a config file. Write finetune probe configs/probe/demo.yaml pretrained=runs/m"),
    ("finetune knn runs/m", "config: runs/m is not a config file. Write finetune knn configs/knn/demo.yaml pretrained=runs/m"),
    ("finetune tune hf-hub:a/b dataset=shapes", "config: hf-hub:a/b is not a config file. Write finetune tune configs/finetune/demo.yaml pretrained=hf-hub:a/b"),
    ("finetune probe knn.yaml", "this is a config of finetune knn, not of finetune probe; run finetune knn knn.yaml"),
    ("finetune knn knn.yaml neighbours=[900]", "neighbours: 900 is more than the 240 samples of 'train'; leave it out"),
    ("finetune probe probe.yaml data.dataset=noval", "noval: has no split 'val'; known: train; build it elsewhere with source.val_share=0.1"),
    ("finetune probe probe.yaml pretrained=shapes", "shapes: is a dataset, and holds no checkpoint; give a run directory (runs/NAME)"),
    ("finetune probe probe.yaml pretrained=runs/mm", "runs/mm: is not there; give a run directory (runs/NAME), or a folder of weights"),
    ("finetune probe probe.yaml pretrained=runs/m/checkpoints/step-00000008/model.safetensors", "is a file; give the directory that it is in"),
    ("finetune probe probe.yaml run_dir=runs/m", "run_dir: runs/m is a run of pretrain train; name another run_dir"),
    ("finetune tune tune.yaml run_dir=runs/m", "run_dir: runs/m is a run of pretrain train; name another run_dir"),
    ("finetune tune tune.yaml --ranks 3", "train.global_batch_size: 8 does not split over 3 ranks; the nearest that does is 6 or 9"),
    ("finetune probe probe.yaml pretrained=hf-hub:mine", "hf-hub:mine: mine is no name on the hub; write USER/NAME"),
    ("finetune export runs/m out --push-to mine", "push_to: mine is no name on the hub; write USER/NAME"),
    ("finetune export runs/m out --revision v2", "revision: changes nothing without push_to; set push_to=USER/NAME, or leave it out"),
    ("finetune evaluate runs/m shapes", "runs/m: which setting is it? Write finetune evaluate pretrained=runs/m data.dataset=shapes"),
    ("finetune evaluate pretrained=shapes data.dataset=runs/m", "runs/m: is a run, or its weights, and no dataset"),
    ("finetune evaluate pretrained=runs/m data.dataset=other", "has other classes than the checkpoint (8 classes against 5); probe or tune on it first"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes split=vall", "shapes: has no split 'vall'; did you mean 'val'?"),
    ("finetune evaluate pretrained=runs/m data.dataset=noval", "noval: has no split 'val'; known: train; build it elsewhere with source.val_share=0.1"),
    ("finetune probe probe.yaml features=cache cache_gb=0", "GB more, and cache_gb allows 0; set features=stream optimizer=lion, which keeps none, or raise cache_gb"),
    ("finetune evaluate train.yaml", "this is a config of pretrain train, not of finetune evaluate; run pretrain train train.yaml"),
    ("finetune evaluate nowhere.yaml pretrained=runs/m", "nowhere.yaml: no such config file; name a YAML file"),
    ("finetune export runs/m", "out: missing; write finetune export runs/m DIRECTORY"),
    ("finetune export probe.yaml", "this is a config of finetune probe or finetune knn or finetune evaluate, not of finetune export"),
    ("finetune export shapes out", "shapes: is a dataset, and holds no checkpoint"),
    ("finetune export runs/m pics", "out: pics exists and is not an export; name another out"),
    ("finetune export runs/m o --formats onx", "formats.0: 'onx' is not one of its values; did you mean 'onnx'?"),
    ("finetune export runs/m o license=Apache", "license: 'Apache' will not do; it must match pattern"),
    ("finetune predict runs/m pics", "--out: missing; name the file to write"),
    ("finetune predict shapes pics --out x.csv", "shapes: is a dataset, and holds no checkpoint"),
    ("analysis report nowhere", "nowhere: the folder does not exist."),
    ("analysis report empty", "empty: the folder has no runs."),
    ("analysis table points.csv", "points.csv: is a file."),
    ("analysis filters nowhere", "nowhere: is not there; give a run directory (runs/NAME), or a folder of weights"),
    ("analysis filters shapes", "shapes: is a dataset, and holds no checkpoint; give a run directory (runs/NAME)"),
    ("analysis filters runs/m --out /proc/x", "--out: /proc cannot be made, for /proc cannot be written to; name another --out"),
    ("analysis filters runs/m --out x.png", "--out: x.png has an ending"),
    ("analysis filters runs/m --count 0", "--count: '0' will not do; give a whole number from 1 up"),
    ("analysis spectra", "RUN: needs one of: runs, --fig4, --figs1."),
    ("analysis structure nowhere", "nowhere: is not there; give a run directory (runs/NAME), or a folder of weights"),
    ("analysis masks --tokens 1000", "--tokens: 1000 is not between 2 and 64."),
    ("analysis masks --seed -1", "--seed: '-1' will not do; give a whole number from 0 up"),
    ("analysis scaling points.csv", "points.csv: has the columns"),
    ("analysis scaling pics", "pics: is a folder."),
    ("analysis scaling p.parquet --epochs 0", "--epochs: 0 is not a positive number."),
    ("analysis scaling p.parquet --out laws.png", "--out: laws.png has an ending"),
    ("analysis efficiency --out x.json", "--out: x.json has an ending"),
    ("analysis efficiency --batch 0", "--batch: '0' will not do; give a whole number from 1 up"),
    ("data_prep build nope.yaml", "nope.yaml: no such config file"),
    ("data_prep build pics", "pics: is a directory, no config; for a folder of pictures write --source folder source.path=pics"),
    ("data_prep build train.yaml", "this is a config of pretrain train, not of data_prep build; run pretrain train train.yaml"),
    ("data_prep index build.yaml", "this is a config of data_prep build, not of data_prep index; run data_prep build build.yaml"),
    ("data_prep build --source foldr --out x", "source.kind: 'foldr' is not one of its values; did you mean 'folder'?"),
    ("data_prep build --source folder --out x", "source.path: missing; set it in the config or as source.path=VALUE"),
    ("data_prep build --source folder --out . source.path=.", "out: '.' is the source itself, or in it; name another directory"),
    ("data_prep build --source synthetic --out x source.num_clases=3", "source.num_clases: unknown key; did you mean 'num_classes'?"),
    ("data_prep build --source synthetic --out x encoding=png", "encoding: 'png' is not one of its values"),
    ("data_prep build --source folder --out x source.path=pics classes_file=nope.txt", "classes_file: nope.txt cannot be read"),
    ("data_prep build --sauce folder", "data_prep build: --sauce: no such option; did you mean --source?"),
    ("data_prep index --train points.csv --out y label=json", "label: 'json' will not do; write cls, txt, none, or json:FIELD such as json:meta.class"),
    ("data_prep index --train pics --out y", "pics: is a folder; name its shards, such as pics/*.tar"),
    ("data_prep index --train nope.tar --out y", "nope.tar: no such file; a pattern may hold"),
    ("data_prep merge pics", "pics: holds no parts of a build; run data_prep build CONFIG --task i/n first"),
    ("data_prep verify shapes extra", "extra: is one word too many; write data_prep verify DATASET"),
    ("data_prep stats pics", "pics: is a folder of pictures, no dataset yet"),
    ("data_prep stats shapes --workers 0", "--workers: '0' will not do; give a whole number from 1 up"),
    ("data_prep show noval --split val", "noval: has no split 'val'; known: train; build it elsewhere with source.val_share=0.1"),
    ("data_prep subset shapes", "--out missing; write data_prep subset DATASET --out DIR"),
    ("data_prep subset shapes --out shapes --count 3", "out: shapes is the dataset that the samples are chosen from; name another directory"),
    ("data_prep dedup shapes --against nowhere", "nowhere: no such dataset directory"),
    ("wide-mlps list train.yaml", "this is a config of pretrain train, not of cluster/submit; run pretrain train train.yaml"),
    ("wide-mlps lst plan.yaml", "VERB: 'lst' is not one of them; did you mean 'list'?"),
    ("cluster/submit nope.yaml", "nope.yaml: no such config file"),
    ("cluster/submit cluster/nope.slurm train.yaml", "cluster/nope.slurm: no such file; name a job script, such as cluster/pretrain.slurm"),
    ("cluster/doctor train.yaml", "train.yaml: name the job script before it, such as cluster/pretrain.slurm"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_one_line_with_its_remedy_at_no_cost(
    typed: str, words: str, lab: Path, light: Light
) -> None:
    check(light, lab, shlex.split(typed), words)


READING = [
    ("data_prep build --source folder --out y source.path=pcis", "source.path: pcis is not a directory; give the folder that holds the classes"),
    ("data_prep build --source folder --out y source.path=flat", "pictures lie in flat itself, in no class"),
    ("data_prep build --source folder --out y source.path=empty", "source.path: empty holds no class folders; the layout is PATH/CLASS/*.jpg"),
    ("data_prep build --source folder --out y source.path=pics classes=[nope]", "classes: 1 are not in the source (nope)"),
    ("data_prep build --source folder --out y source.path=pics source.labels=nope.csv", "source.labels: nope.csv is not there; give a CSV or Parquet file"),
    ("data_prep build --source folder --out runs/m source.path=pics image_size=16", "out: runs/m holds checkpoints, and no dataset was begun there"),
    ("data_prep build --source folder --out noval source.path=pics image_size=32 num_workers=1 source.val_share=0", "out: noval holds a dataset of another config (image_size: 32, was 16); name another out"),
    ("data_prep index --train shapes/train-000000.tar --out shapes num_workers=1", "out: shapes holds a dataset of another config"),
    ("data_prep subset shapes --out z --count 900", "count: 900"),
    ("data_prep show shapes --shard 99", "shard: 99, but train has the shards 0 to"),
    ("pretrain import points.csv --out o", "points.csv: is not a whole file of weights (safetensors or torch); download or copy it again"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "words"), READING, ids=[row[0] for row in READING])
def test_a_mistake_that_only_the_data_can_tell_is_one_line_too(
    typed: str, words: str, lab: Path, light: Light
) -> None:
    check(light, lab, shlex.split(typed), words, limited=False)


def test_lists_and_help_import_nothing_heavy(tmp_path: Path, light: Light) -> None:
    for typed in (
        "data_prep --help",
        "data_prep build --help",
        "pretrain --help",
        "finetune tune --help",
        "analysis --help",
    ):
        answer = light.run(tmp_path, *typed.split())
        assert answer.code == 0 and answer.heavy == [] and "usage: " in answer.said, answer


def test_the_shipped_configs_are_valid_and_headed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a delta of at most 40 lines under a header that says command, hardware and result."""
    from data_prep.build.config import BuildSettings
    from data_prep.index.config import IndexSettings
    from data_prep.settings import load_settings
    from finetune.probe.config import KnnSettings, ProbeSettings
    from finetune.tune.config import TuneSettings
    from pretrain.config import PretrainSettings

    schemas = {
        "data_prep": BuildSettings,
        "pretrain": PretrainSettings,
        "probe": ProbeSettings,
        "knn": KnnSettings,
        "finetune": TuneSettings,
    }
    seen = 0
    for folder, schema in schemas.items():
        for path in sorted((REPOSITORY / "configs" / folder).glob("*.yaml")):
            wanted = IndexSettings if path.name.startswith("index_") else schema
            load_settings(wanted, path=path, overrides=[])  # type: ignore[type-var]
            lines = path.read_text().splitlines()
            header = [line for line in lines if line.startswith("#")]
            assert len(lines) <= 40 and path.read_text().startswith("#"), path
            for word in ("# command", "# hardware", "# result"):
                assert any(line.startswith(word) for line in header), (path, word)
            seen += 1
    assert seen >= 20


def test_show_prints_what_reads_back_to_the_same(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(PRETRAIN.replace("DATASET", str(shapes)))
    assert (
        pretrain(["show", str(config), "model={preset: mixer_b_w, depth: 2}", "optimizer.lr=3e-4"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "num_channels: 588" in shown and "lr: 0.0003" in shown
    config.write_text(shown)
    assert pretrain(["show", str(config)]) == 0
    assert capsys.readouterr().out == shown
