"""Every mistake in a config, a path or an argument is one line with its field, before heavy
imports.

Each row of the tables has the typed words, the field, and the code. It runs in a fork of one
process without heavy imports.
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
from tests.errors import printed_errors
from tests.light import Light

MOST_CPU_S = 0.6
"""CPU seconds of a row without the imports of our modules; a row takes about a twentieth."""


@pytest.fixture(scope="module")
def light() -> Iterator[Light]:
    server = Light()
    yield server
    server.close()


def check(
    light: Light, place: Path, words: list[str], field: str, code: str, *, is_quick: bool = True
) -> None:
    """Run the words, which fail with one line. `is_quick`: without reading data."""
    answer = light.run(place, *words)
    said = answer.said if is_quick else answer.said.removeprefix("loading torch\n")
    assert answer.code == 2, answer
    assert "\n" not in said and "Traceback" not in said, answer
    assert "hush" not in said and "secret" not in said, answer
    assert printed_errors(said) == [(field, code)], answer
    assert not is_quick or (answer.heavy == [] and answer.cpu_s < MOST_CPU_S), answer


PRETRAIN = """
run_dir: runs/x
data: {dataset: DATASET}
model: {kind: mlp, depth: 2, width: 8}
train: {duration: 2 epochs, global_batch_size: 24}
"""
STREAM = "stream: true, num_classes: 9, samples_per_epoch: 24, image_size: 16"

TABLE = [
    ("section misspelt", ["optimiser.lr=1"], "optimiser", "unknown-key"),
    ("key misspelt", ["optimizer.weight_decy=0.1"], "optimizer.weight_decy", "unknown-key"),
    ("key of the model", ["model.widht=3"], "model.widht", "unknown-key"),
    ("text for a number", ["optimizer.lr=fast"], "optimizer.lr", "bad-value"),
    ("yes for true", ["engine.compile=yes"], "engine.compile", "bad-value"),
    ("negative", ["optimizer.lr=-1"], "optimizer.lr", "bad-value"),
    ("unknown optimizer", ["optimizer.name=lyon"], "optimizer.name", "bad-value"),
    ("other case", ["LR=1"], "LR", "unknown-key"),
    ("other case of a word", ["precision=FP32"], "engine.precision", "bad-value"),
    ("a part of a key", ["batch_size=8"], "batch_size", "unknown-key"),
    ("name of an optimizer alone", ["optimizer=adamw"], "optimizer", "bad-value"),
    ("unknown stage", ["engine.zero_stage=4"], "engine.zero_stage", "bad-value"),
    ("unknown kind of model", ["model.kind=mxer"], "model.kind", "bad-value"),
    ("unknown preset", ["model={preset: mlp_b12_wi1042}"], "model.preset", "unknown-name"),
    ("a list for a preset", ["model={preset: [mixer_b_w]}"], "model.preset", "unknown-name"),
    ("preset on top of a model", ["model.preset=mixer_ss_w"], "model.preset", "conflict"),
    ("an import that is no class", ["model={import: my_models}"], "model.import", "bad-value"),
    ("an import of nothing", ["model={import: 'nowhere.models:MyModel'}"], "model.import", "unknown-name"),
    ("offload of what is not sharded", ["engine.zero_stage=0", "engine.offload=optimizer"], "engine.offload", "conflict"),
    ("best of nothing", ["checkpoint.keep_best=true", "data.eval_split=null"], "checkpoint.keep_best", "conflict"),
    ("mirror that nobody can write", ["checkpoint.remote=https://host/run"], "checkpoint.remote", "bad-value"),
    ("secrets in an address", ["checkpoint.remote=s3://key:secret@bucket/run"], "checkpoint.remote", "bad-value"),
    ("a query of a mirror", ["checkpoint.remote=gs://bucket/run?version"], "checkpoint.remote", "bad-value"),
    ("a token in a stream", ["data.dataset=a.tar::https://host/a-{0..3}.tar?token=hush"], "data.dataset", "bad-value"),
    ("a password of another dataset", ["data.extra_datasets=[{dataset: 'https://me:hush@host/more'}]"], "data.extra_datasets.0.dataset", "bad-value"),
    ("a tracking server's password", ["tracking.uri=https://me:hush@host"], "tracking.uri", "bad-value"),
    ("a secret for options", ["checkpoint.remote_storage=secret"], "checkpoint.remote_storage", "bad-value"),
    ("a secret in what is no YAML", ["data.storage={key: secret]"], "data.storage", "bad-syntax"),
    ("options of no mirror", ["checkpoint.remote_storage={key: me}"], "checkpoint.remote_storage", "conflict"),
    ("options of a mirror that is left out", ["checkpoint.remote_storage={key: me}", "checkpoint.remote=null", "data.dataset=nowhere"], "nowhere", "missing-path"),
    ("evaluation never", ["train.eval_every=0 steps"], "train.eval_every", "bad-value"),
    ("duration without unit", ["train.duration=90"], "train.duration", "bad-value"),
    ("duration with a wrong unit", ["train.duration=90 hours"], "train.duration", "bad-value"),
    ("half a step", ["train.duration=1.5 steps"], "train.duration", "bad-value"),
    ("no window of steps", ["tracking.profile=20-25"], "tracking.profile", "bad-value"),
    ("a window after the end", ["train.duration=9 steps", "tracking.profile=steps 5-10"], "tracking.profile", "bad-value"),
    ("rising cosine", ["schedule.final_lr=1"], "schedule.final_lr", "conflict"),
    ("constant that ends elsewhere", ["schedule={name: constant, final_lr: 1e-5}"], "schedule.final_lr", "conflict"),
    ("warm-up from above", ["schedule={warmup: 1 epochs, warmup_from: 1e-3}"], "schedule.warmup_from", "conflict"),
    ("start of no warm-up", ["schedule.warmup_from=1e-6"], "schedule.warmup_from", "conflict"),
    ("unknown size of a micro-batch", ["train.local_batch_size=aut"], "train.local_batch_size", "bad-value"),
    ("odd share for auto with MixUp", ["augment.mixup_alpha=0.8", "train.local_batch_size=auto", "train.global_batch_size=6", "--ranks", "2"], "train.local_batch_size", "conflict"),
    ("momentum for adamw", ["optimizer={name: adamw, momentum: 0.8}"], "optimizer.momentum", "conflict"),
    ("local batch does not divide", ["train.local_batch_size=5"], "train.local_batch_size", "bad-value"),
    ("batch does not split over ranks", ["train.global_batch_size=25", "--ranks", "2"], "train.global_batch_size", "conflict"),
    ("local batch too large for the ranks", ["train.local_batch_size=24", "--ranks", "2"], "train.local_batch_size", "bad-value"),
    ("odd batch with MixUp", ["augment.mixup_alpha=0.8", "train.local_batch_size=3"], "train.local_batch_size", "conflict"),
    ("odd batch with both", ["augment={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.local_batch_size=3"], "train.local_batch_size", "conflict"),
    ("odd share of a rank with CutMix", ["augment.cutmix_alpha=1.0", "train.global_batch_size=6", "--ranks", "2"], "train.local_batch_size", "conflict"),
    ("unknown policy", ["augment.auto_augment=orginal"], "augment.auto_augment", "unknown-name"),
    ("two ways to crop", ["augment={crop_scale: [0.4, 1.0], crop_padding: 4}"], "augment.crop_padding", "conflict"),
    ("crop range upside down", ["augment.crop_scale=[0.9, 0.1]"], "augment.crop_scale", "bad-value"),
    ("crop range too short", ["augment.crop_scale=[0.9]"], "augment.crop_scale.1", "missing-value"),
    ("augmentation behind no order of pixels", ["data.permute=before"], "data.permute", "conflict"),
    ("betas for sgd", ["optimizer={name: sgd, lr: 0.1, betas: [0.9, 0.9]}"], "optimizer.betas", "conflict"),
    ("betas out of range", ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas", "bad-value"),
    ("compile at stage 3", ["engine={compile: true, zero_stage: 3}"], "engine.compile", "conflict"),
    ("patch of a sparse MLP does not divide", ["model={kind: sw_mlp, patch_size: 5}"], "model.patch_size", "conflict"),
    ("patch of a transformer does not divide", ["model={preset: vit_b_4}", "data.image_size=18"], "model.patch_size", "conflict"),
    ("no such block", ["model={kind: mixer, depth: 2, permuted_blocks: [2]}"], "model.permuted_blocks", "bad-value"),
    ("blocks by a wrong word", ["model={kind: mixer, permuted_blocks: some}"], "model.permuted_blocks", "bad-value"),
    ("hidden width without a hidden layer", ["model={kind: mixer, layers_per_mixing: 1, token_hidden: 9}"], "model.token_hidden", "conflict"),
    ("expansion beside hidden widths", ["model={kind: mixer, expansion: 2.0, token_hidden: 8, channel_hidden: 8}"], "model.expansion", "conflict"),
    ("expansion of one layer", ["model={kind: mixer, layers_per_mixing: 1, expansion: 2.0}"], "model.expansion", "conflict"),
    ("expansion without a bottleneck", ["model={kind: mlp, bottleneck: none, expansion: 2.0}"], "model.expansion", "conflict"),
    ("name of a model alone", ["model=mixer_b_w"], "model", "bad-value"),
    ("fewer connections than neurons", ["model={kind: sw_mlp, width: 50, density: 0.01}"], "model.density", "bad-value"),
    ("no such split", ["data.eval_split=vall"], "data.eval_split", "unknown-name"),
    ("no such dataset", ["data.dataset=nowhere"], "nowhere", "missing-path"),
    ("dataset of a mixture without its section", ["data.extra_datasets=[somewhere]"], "data.extra_datasets.0", "bad-value"),
    ("mixture without a dataset", ["data.extra_datasets=[{split: train}]"], "data.extra_datasets.0.dataset", "missing-value"),
    ("no such split to mix", ["data.extra_datasets=[{dataset: DATASET, split: trian}]"], "data.extra_datasets.0.split", "unknown-name"),
    ("weight alone", ["data.weight=2.0"], "data.weight", "conflict"),
    ("one weight of two", ["data={dataset: DATASET, weight: 1, extra_datasets: [{dataset: DATASET}]}"], "data.weight", "conflict"),
    ("weights that differ by nothing", ["data={dataset: DATASET, weight: 999.999999, extra_datasets: [{dataset: DATASET, weight: 999.999998}, {dataset: DATASET, weight: 999.999997}]}"], "data.weight", "bad-value"),
    ("mixture that drops", ["data={dataset: DATASET, last_batch: drop, extra_datasets: [{dataset: DATASET}]}"], "data.last_batch", "conflict"),
    ("stream without its classes", ["data={dataset: DATASET/train-000000.tar, stream: true, samples_per_epoch: 9}"], "data.num_classes", "missing-value"),
    ("classes of no stream", ["data.num_classes=4"], "data.num_classes", "conflict"),
    ("stream that is to be evaluated", ["data={STREAM, dataset: DATASET/train-000000.tar}"], "data.eval_split", "conflict"),
    ("stream with staged copies", ["data={STREAM, dataset: x.tar, stage_dir: /x}"], "data.stage_dir", "conflict"),
    ("stream of an indexed dataset", ["data={STREAM, dataset: DATASET, eval_split: null}"], "data.dataset", "conflict"),
    ("stream of a pattern", ["data={STREAM, dataset: 'DATASET/*.tar', eval_split: null}"], "data.dataset", "missing-path"),
    ("stream of an unknown scheme", ["data={STREAM, dataset: 'gopher://x/a.tar', eval_split: null}"], "data.dataset", "unsupported"),
    ("stream of a variable that is not set", ["data={STREAM, dataset: '${ROOT}/a.tar', eval_split: null}"], "data.dataset", "missing-value"),
    ("stream with other classes than its evaluation", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_dataset: DATASET}"], "data.num_classes", "mismatch"),
    ("fewer shards than ranks", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_split: null}", "--ranks", "3"], "data.dataset", "mismatch"),
    ("mixing across the ranks of a stream", ["data={STREAM, dataset: DATASET/train-000000.tar, eval_split: null}", "augment={mixup_alpha: 0.8, mixup_pairing: ffcv}"], "augment.mixup_pairing", "conflict"),
    ("a batch that drop never fills", ["data.last_batch=drop", "train.global_batch_size=512"], "train.global_batch_size", "bad-value"),
    ("a batch of more than there is", ["train.global_batch_size=248"], "train.global_batch_size", "bad-value"),
    ("value instead of section", ["optimizer=3"], "optimizer", "bad-value"),
    ("override into a value", ["run_dir.x=3"], "run_dir.x", "bad-value"),
    ("broken YAML in an override", ["augment.crop_scale=[0.9"], "augment.crop_scale", "bad-syntax"),
    ("resume that cannot be", ["resume=must"], "resume", "conflict"),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "field", "code"), [row[1:] for row in TABLE], ids=[str(row[0]) for row in TABLE]
)
def test_a_bad_pretraining_config(
    shapes: Path, tmp_path: Path, overrides: list[str], field: str, code: str, light: Light
) -> None:
    (tmp_path / "c.yaml").write_text(PRETRAIN.replace("DATASET", str(shapes)))
    words = [word.replace("STREAM", STREAM) for word in overrides]
    words = [word.replace("DATASET", str(shapes)) for word in ("c.yaml", *words)]
    check(light, tmp_path, ["pretrain", "train", *words], field, code)


FILES = [
    ("not YAML", b"a: [1", "bad-syntax"),
    ("a list", b"- 1\n- 2", "bad-syntax"),
    ("doubled key", b"run_dir: a\nrun_dir: b", "bad-syntax"),
    ("nothing", b"", "missing-value"),
    ("bytes", b"\xff\xfe\x00", "unreadable"),
]


@pytest.mark.parametrize(
    ("text", "code"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_a_bad_config_file(tmp_path: Path, text: bytes, code: str, capsys: Capture) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    assert pretrain(["train", str(path)]) == 2
    errors = printed_errors(capsys.readouterr().err)
    assert (("run_dir" if code == "missing-value" else str(path)), code) in errors


PROBE = "run_dir: runs/p\npretrained: null\ndata: {dataset: DATASET}\n"
TUNE = (
    "run_dir: runs/t\npretrained: RUN\ndata: {dataset: DATASET}\ntrain: {duration: 1 epochs,"
    " global_batch_size: 8}\n"
)
LATER = [
    ("probe", ["test_split=train"], "data.test_split", "conflict"),
    ("probe", ["lrs=[]"], "lrs", "bad-value"),
    ("probe", ["lrs=[0.1, -1]"], "lrs", "bad-value"),
    ("probe", ["pretrained=nowhere"], "nowhere", "missing-path"),
    ("probe", ["holdout_fraction=1.5"], "holdout_fraction", "bad-value"),
    ("probe", ["test_split=vall"], "DATASET", "unknown-name"),
    ("probe", ["optimizer={name: sgd}"], "optimizer", "bad-value"),
    ("probe", ["optimizer=lbfgs", "lrs=[0.1, 0.2]"], "lrs", "conflict"),
    ("probe", ["features_dir=/proc/f"], "features_dir", "no-access"),
    ("tune", ["data={STREAM, dataset: x.tar, eval_split: null}"], "data.stream", "unsupported"),
    ("tune", ["init=random"], "init", "bad-value"),
    ("tune", ["seeds=3"], "seeds", "bad-value"),
    ("tune", ["betas=0.9,0.99"], "optimizer.betas", "bad-value"),
    ("tune", ["checkpoint.keep_best=true", "data.eval_split=null"], "checkpoint.keep_best", "conflict"),
    ("tune", [], "nowhere", "missing-path"),
    ("tune", ["engine.zero_stage=2"], "engine.zero_stage", "unknown-key"),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("verb", "overrides", "field", "code"), LATER)
def test_a_bad_transfer_config(
    shapes: Path,
    tmp_path: Path,
    verb: str,
    overrides: list[str],
    field: str,
    code: str,
    light: Light,
) -> None:
    text = {"probe": PROBE, "tune": TUNE}[verb].replace("RUN", "nowhere")
    (tmp_path / "c.yaml").write_text(text.replace("DATASET", str(shapes)))
    words = ["finetune", verb, "c.yaml", *(each.replace("STREAM", STREAM) for each in overrides)]
    check(light, tmp_path, words, field.replace("DATASET", str(shapes)), code)


@pytest.fixture(scope="module")
def lab(shapes: Path, other_shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs, datasets and a run for commands with mistakes."""
    lab = tmp_path_factory.mktemp("lab")
    write_classes(lab / "pics", {"ant": 3, "bee": 3})
    for name, target in {"shapes": shapes, "other": other_shapes}.items():
        (lab / name).symlink_to(target)
    of_pictures = [
        f"source.path={lab}/pics",
        "image_size=16",
        "num_workers=1",
        "source.val_fraction=0",
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
        "run_dir: runs/k\npretrained: runs/m\nneighbors: [3]\ndata: {dataset: shapes}\n"
    )
    (lab / "build.yaml").write_text("source: {kind: folder, path: pics}\nout: x\n")
    (lab / "plan.yaml").write_text("pretrain: train.yaml\n")
    settings = load_settings(
        PretrainSettings, path=lab / "train.yaml", overrides=[f"run_dir={lab}/runs/m"]
    )
    names = tuple(f"class-{number}" for number in range(8))
    colors = {"channel_mean": (0.5, 0.5, 0.5), "channel_std": (0.2, 0.2, 0.2)}
    card = ModelCard(model=settings.model, image_size=16, classes=names, dataset="shapes", **colors)
    weights = lab / "runs" / "m" / "checkpoints" / "step-00000008"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text(json.dumps(config_of(card)))
    save_file({"stem.bias": np.zeros(3, np.float32)}, weights / "model.safetensors")
    (lab / "runs" / "m" / "config.yaml").write_text(dump(settings))
    return lab


MISTAKES = [
    ("pretrain", "arguments", "missing-value"),
    ("pretrain trian train.yaml", "COMMAND", "unknown-name"),
    ("pretrain train.yaml", "COMMAND", "unknown-name"),
    ("pretrain train", "arguments", "missing-value"),
    ("pretrain train trian.yaml", "trian.yaml", "missing-path"),
    ("pretrain train run_dir=x", "run_dir=x", "missing-path"),
    ("pretrain train train.yaml optimizer.lr", "optimizer.lr", "bad-syntax"),
    ("pretrain train train.yaml train.duration=30 steps", "steps", "bad-syntax"),
    ("pretrain train train.yaml --optimizer.lr=1", "--optimizer.lr", "unknown-key"),
    ("pretrain train train.yaml --rnaks 2", "--rnaks", "unknown-key"),
    ("pretrain train train.yaml --ranks 0", "--ranks", "bad-value"),
    ("pretrain train train.yaml --ranks", "--ranks", "bad-value"),
    ("pretrain train runs/m lr=0.5", "run_dir", "exists"),
    ("pretrain train runs", "runs", "unreadable"),
    ("pretrain train shapes/train-000000.tar", "shapes/train-000000.tar", "unreadable"),
    ("pretrain train probe.yaml", "probe.yaml", "wrong-command"),
    ("pretrain train tune.yaml", "tune.yaml", "wrong-command"),
    ("pretrain train build.yaml", "build.yaml", "wrong-command"),
    ("pretrain train plan.yaml", "plan.yaml", "wrong-command"),
    ("pretrain show train knn.yaml", "knn.yaml", "wrong-command"),
    ("pretrain train train.yaml data=shapes", "data", "bad-value"),
    ("pretrain train train.yaml data.dataset=noval", "data.eval_split", "unknown-name"),
    ("pretrain train train.yaml data.dataset=shaeps", "shaeps", "missing-path"),
    ("pretrain train train.yaml data.dataset=pics", "pics", "unknown-format"),
    ("pretrain train train.yaml data.dataset=flat", "flat", "unknown-format"),
    ("pretrain train train.yaml data.dataset=runs/m", "runs/m", "wrong-command"),
    ("pretrain train train.yaml data.dataset=unfinished", "unfinished", "unfinished"),
    ("pretrain train train.yaml data.dataset=empty", "empty", "empty"),
    ("pretrain train train.yaml data.dataset=.", ".", "unknown-format"),
    ("pretrain train train.yaml data.dataset=shapes/manifest.json", "shapes/manifest.json", "unknown-format"),
    ("pretrain train train.yaml data.dataset=shapes/train-000000.tar", "shapes/train-000000.tar", "unknown-format"),
    ("pretrain train train.yaml run_dir=shapes", "run_dir", "exists"),
    ("pretrain train train.yaml run_dir=train.yaml", "run_dir", "no-access"),
    ("pretrain train train.yaml run_dir=/proc/x", "run_dir", "no-access"),
    ("pretrain train train.yaml run_dir=runs/m optimizer.lr=0.5", "run_dir", "exists"),
    ("pretrain preview train.yaml --out x.jpg", "out", "bad-value"),
    ("pretrain preview train.yaml --count 0", "--count", "bad-value"),
    ("pretrain preview train.yaml --epoch x", "--epoch", "bad-value"),
    ("pretrain preview train.yaml data.train_split=nothing", "data.train_split", "unknown-name"),
    ("pretrain estimate mlp_b12_wi1024 --optimizer adam", "--optimizer", "bad-value"),
    ("pretrain estimate mlp_b12_wi1024 --nodes 3 --batch 4096", "--batch", "bad-value"),
    ("pretrain models --match mixr_b_16", "--match", "unknown-name"),
    ("pretrain models --match mixer_p7 --image-size 32", "--image-size", "bad-value"),
    ("analysis widths --omega 2^x", "--omega", "bad-value"),
    ("analysis widths --omega 9^999", "--omega", "bad-value"),
    ("analysis widths --channels 3,,4", "--channels", "bad-value"),
    ("analysis widths --gamma nan", "--gamma", "bad-value"),
    ("finetune import nowhere.pth --out o", "nowhere.pth", "missing-path"),
    ("finetune import runs/m/checkpoints/step-00000008 --out o", "runs/m/checkpoints/step-00000008", "missing-path"),
    ("finetune import points.csv --out o --mean .5 .5 .5", "--std", "missing-value"),
    ("finetune import points.csv --out o --mean 124 116 104 --std 58 57 57", "--mean", "bad-value"),
    ("finetune import points.csv --out o --mean 0 0 0 --std 0 1 1", "--std", "bad-value"),
    ("finetune import points.csv --out o --classes nope.txt", "--classes", "missing-path"),
    ("finetune import points.csv --out o --activation swish", "--activation", "bad-value"),
    ("finetune import points.csv --out pics", "out", "exists"),
    ("pretrain sync shapes", "shapes", "wrong-command"),
    ("pretrain ui nowhere", "nowhere", "missing-path"),
    ("pretrain ui shapes --host 192.0.2.1", "--host", "bad-value"),
    ("pretrain recommend nowhere", "nowhere", "missing-path"),
    ("pretrain recommend points.csv", "points.csv", "unreadable"),
    ("pretrain recommend empty --probe", "--probe", "conflict"),
    ("pretrain recommend empty --name a/b", "--name", "bad-value"),
    ("pretrain recommend .", ".", "bad-value"),
    ("finetune probe train.yaml", "train.yaml", "wrong-command"),
    ("finetune tune probe.yaml", "probe.yaml", "wrong-command"),
    ("finetune probe runs/m", "config", "wrong-command"),
    ("finetune knn runs/m", "config", "wrong-command"),
    ("finetune tune hf-hub:a/b dataset=shapes", "config", "wrong-command"),
    ("finetune probe knn.yaml", "knn.yaml", "wrong-command"),
    ("finetune knn knn.yaml neighbors=[900]", "neighbors", "bad-value"),
    ("finetune probe probe.yaml data.dataset=noval", "noval", "unknown-name"),
    ("finetune probe probe.yaml pretrained=shapes", "shapes", "wrong-command"),
    ("finetune probe probe.yaml pretrained=runs/mm", "runs/mm", "missing-path"),
    ("finetune probe probe.yaml pretrained=runs/m/checkpoints/step-00000008/model.safetensors", "runs/m/checkpoints/step-00000008/model.safetensors", "wrong-command"),
    ("finetune probe probe.yaml run_dir=runs/m", "run_dir", "exists"),
    ("finetune tune tune.yaml run_dir=runs/m", "run_dir", "exists"),
    ("finetune tune tune.yaml --ranks 3", "train.global_batch_size", "conflict"),
    ("finetune export runs/m out --push-to mine", "push_to", "bad-value"),
    ("finetune export runs/m out --revision v2", "revision", "conflict"),
    ("finetune evaluate runs/m shapes", "runs/m", "bad-syntax"),
    ("finetune evaluate pretrained=shapes data.dataset=runs/m", "runs/m", "wrong-command"),
    ("finetune evaluate pretrained=runs/m data.dataset=other", "dataset", "mismatch"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes split=vall", "shapes", "unknown-name"),
    ("finetune evaluate pretrained=runs/m data.dataset=noval", "noval", "unknown-name"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes num_views=2 augment.mixup_alpha=0.8", "augment.mixup_alpha", "conflict"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes include_plain=true", "include_plain", "conflict"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes augment.flip_probability=0", "augment", "conflict"),
    ("finetune evaluate pretrained=runs/m data.dataset=shapes viewss=3", "viewss", "unknown-key"),
    ("finetune probe probe.yaml features=cache cache_gb=0", "features", "no-space"),
    ("finetune evaluate train.yaml", "train.yaml", "wrong-command"),
    ("finetune evaluate nowhere.yaml pretrained=runs/m", "nowhere.yaml", "missing-path"),
    ("finetune export runs/m", "out", "missing-value"),
    ("finetune export probe.yaml", "probe.yaml", "wrong-command"),
    ("finetune export shapes out", "shapes", "wrong-command"),
    ("finetune export runs/m pics", "out", "exists"),
    ("finetune export runs/m o --formats timm,onxx", "formats.1", "bad-value"),
    ("finetune export runs/m o --formats timm --with-preprocessing", "with_preprocessing", "conflict"),
    ("finetune export empty o", "empty", "empty"),
    ("finetune export runs/m o license=Apache", "license", "bad-value"),
    ("finetune predict runs/m pics", "--out", "missing-value"),
    ("finetune predict shapes pics --out x.csv", "shapes", "wrong-command"),
    ("finetune predict runs/m pics --out p.txt", "--out", "bad-value"),
    ("finetune predict runs/m pics --out p.csv --features p.csv", "--features", "conflict"),
    ("finetune predict runs/m pics --out p.csv --features f.csv", "--features", "bad-value"),
    ("finetune predict runs/m pics --out /proc/p.csv", "--out", "no-access"),
    ("finetune predict runs/m gone --out p.csv", "IMAGES", "missing-path"),
    ("finetune predict runs/m s3://bucket/a.tar --out p.csv", "IMAGES", "unsupported"),
    ("finetune predict runs/m pics --out p.csv --split val", "--split", "conflict"),
    ("finetune predict runs/m pics --out p.csv --top 9", "--top", "bad-value"),
    ("finetune predict runs/m shapes --out p.csv --split vla", "shapes", "unknown-name"),
    ("analysis report nowhere", "nowhere", "missing-path"),
    ("analysis report empty", "empty", "empty"),
    ("analysis report runs --out x.png", "--out", "bad-value"),
    ("analysis table points.csv", "points.csv", "wrong-command"),
    ("analysis filters nowhere", "nowhere", "missing-path"),
    ("analysis filters shapes", "shapes", "wrong-command"),
    ("analysis filters runs/m --out /proc/x", "--out", "no-access"),
    ("analysis filters runs/m --out x.png", "--out", "bad-value"),
    ("analysis filters runs/m --count 0", "--count", "bad-value"),
    ("analysis spectra", "RUN", "conflict"),
    ("analysis structure nowhere", "nowhere", "missing-path"),
    ("analysis masks --seed -1", "--seed", "bad-value"),
    ("analysis scaling p.parquet --epochs 0", "--epochs", "bad-value"),
    ("analysis scaling p.parquet --out laws.png", "--out", "bad-value"),
    ("analysis efficiency --out x.json", "--out", "bad-value"),
    ("analysis efficiency --batch 0", "--batch", "bad-value"),
    ("data_prep build nope.yaml", "nope.yaml", "missing-path"),
    ("data_prep build pics", "pics", "wrong-command"),
    ("data_prep build train.yaml", "train.yaml", "wrong-command"),
    ("data_prep index build.yaml", "build.yaml", "wrong-command"),
    ("data_prep build --source foldr --out x", "source.kind", "bad-value"),
    ("data_prep build --source folder --out x", "source.path", "missing-value"),
    ("data_prep build --source folder --out . source.path=.", "out", "conflict"),
    ("data_prep build --source synthetic --out x source.num_clases=3", "source.num_clases", "unknown-key"),
    ("data_prep build --source synthetic --out x encoding=png", "encoding", "bad-value"),
    ("data_prep build --source folder --out x source.path=pics classes_file=nope.txt", "classes_file", "missing-path"),
    ("data_prep build --sauce folder", "--sauce", "unknown-key"),
    ("data_prep index --train points.csv --out y label=json", "label", "bad-value"),
    ("data_prep index --train pics --out y", "pics", "bad-value"),
    ("data_prep index --train nope.tar --out y", "nope.tar", "missing-path"),
    ("data_prep merge pics", "pics", "unfinished"),
    ("data_prep verify shapes extra", "extra", "bad-syntax"),
    ("data_prep stats pics", "pics", "unknown-format"),
    ("data_prep stats shapes --workers 0", "--workers", "bad-value"),
    ("data_prep preview noval --split val", "noval", "unknown-name"),
    ("data_prep subset shapes", "arguments", "missing-value"),
    ("data_prep subset shapes --out shapes --count 3", "out", "conflict"),
    ("data_prep dedup shapes --against nowhere", "nowhere", "missing-path"),
    ("wide-mlps list train.yaml", "train.yaml", "wrong-command"),
    ("wide-mlps lst plan.yaml", "COMMAND", "unknown-name"),
    ("cluster/submit nope.yaml", "nope.yaml", "missing-path"),
    ("cluster/submit cluster/nope.slurm train.yaml", "cluster/nope.slurm", "missing-path"),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("typed", "field", "code"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_on_the_command_line(
    typed: str, field: str, code: str, lab: Path, light: Light
) -> None:
    check(light, lab, shlex.split(typed), field, code)


READING = [
    ("analysis scaling points.csv", "points.csv", "unknown-format"),
    ("analysis scaling pics", "pics", "unknown-format"),
    ("data_prep build --source folder --out y source.path=pcis", "source.path", "missing-path"),
    ("data_prep build --source folder --out y source.path=flat", "source.path", "unknown-format"),
    ("data_prep build --source folder --out y source.path=empty", "source.path", "unknown-format"),
    ("data_prep build --source folder --out y source.path=pics classes=[nope]", "classes", "unknown-name"),
    ("data_prep build --source folder --out y source.path=pics source.labels=nope.csv", "source.labels", "missing-path"),
    ("data_prep build --source folder --out runs/m source.path=pics image_size=16", "out", "exists"),
    ("data_prep build --source folder --out noval source.path=pics image_size=32 num_workers=1 source.val_fraction=0", "out", "changed"),
    ("data_prep index --train shapes/train-000000.tar --out shapes num_workers=1", "out", "changed"),
    ("data_prep subset shapes --out z --count 900", "count", "bad-value"),
    ("data_prep preview shapes --shard 99", "shard", "bad-value"),
    ("finetune import points.csv --out o", "points.csv", "damaged"),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("typed", "field", "code"), READING, ids=[row[0] for row in READING])
def test_a_mistake_that_only_the_data_shows(
    typed: str, field: str, code: str, lab: Path, light: Light
) -> None:
    check(light, lab, shlex.split(typed), field, code, is_quick=False)


@pytest.mark.processes
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


def test_show_prints_what_reads_back_to_the_same(
    shapes: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(PRETRAIN.replace("DATASET", str(shapes)))
    assert (
        pretrain(
            [
                "show",
                "train",
                str(config),
                "model={preset: mixer_b_w, depth: 2}",
                "optimizer.lr=3e-4",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "num_channels: 588" in shown and "lr: 0.0003" in shown
    config.write_text(shown)
    assert pretrain(["show", "train", str(config)]) == 0
    assert capsys.readouterr().out == shown
