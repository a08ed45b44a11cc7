"""Every mistake in a config is one line that names the field, the value and the remedy, before torch is imported.

The table is the specification: (what is wrong, command, overrides, the words that must be said).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.cli import main as data_prep
from finetune.cli import main as finetune
from pretrain.cli import main as pretrain
from tests.ranks import REPOSITORY

Capture = pytest.CaptureFixture[str]
PRETRAIN = """
run_dir: runs/x
data: {dataset: DATASET}
model: {kind: mlp, depth: 2, width: 8}
train: {duration: 2 epochs, global_batch_size: 24}
"""

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
    ("unknown stage", ["engine.zero_stage=4"], "engine.zero_stage: 4 is not one of its values; known: 0, 1, 2, 3"),
    ("unknown kind of model", ["model.kind=mxer"], "model.kind: 'mxer' is not one of its values; did you mean 'mixer'?"),
    ("unknown preset", ["model={preset: mlp_b12_wi1042}"], "model.preset: 'mlp_b12_wi1042' is not a known model; did you mean 'mlp_b12_wi1024'?"),
    ("a list for a preset", ["model={preset: [mixer_b_w]}"], "model.preset: ['mixer_b_w'] is not a known model; did you mean 'mixer_b_w'?"),
    ("preset on top of a model", ["model.preset=mixer_ss_w"], "model.preset: 'mixer_ss_w' is given beside kind 'mlp', which are two models; for the named one write model='{preset: mixer_ss_w}', or remove kind"),
    ("offload of what is not sharded", ["engine.zero_stage=0", "engine.offload=optimizer"], "engine.offload: 'optimizer' needs engine.zero_stage 1"),
    ("best of nothing", ["checkpoint.keep_best=true", "data.eval_split=null"], "checkpoint.keep_best: true will not do with data.eval_split null"),
    ("evaluation never", ["train.eval_every=0 steps"], "train.eval_every: '0 steps' is never; write how often"),
    ("duration without unit", ["train.duration=90"], "train.duration:"),
    ("duration with a wrong unit", ["train.duration=90 hours"], "train.duration: '90 hours' is not a length; write a number and a unit"),
    ("half a step", ["train.duration=1.5 steps"], "train.duration: '1.5 steps' is not a whole number of steps"),
    ("warm-up too long", ["schedule.warmup=3 epochs"], "schedule.warmup: '3 epochs' is 30 steps, but the run has 20"),
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
    ("betas for sgd", ["optimizer={name: sgd, lr: 0.1, betas: [0.9, 0.9]}"], "optimizer.betas: sgd has none; set optimizer.momentum"),
    ("betas out of range", ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas: [0.9, 1.0] will not do"),
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
    ("a batch that drop never fills", ["data.last_batch=drop", "train.global_batch_size=512"], "data.last_batch: 'drop' leaves nothing of 240 samples, fewer than train.global_batch_size 512"),
    ("section instead of value", ["optimizer.lr={a: 1}"], "optimizer.lr:"),
    ("value instead of section", ["optimizer=3"], "optimizer: 3 will not do; a section (key: value lines) is needed"),
    ("override into a value", ["run_dir.x=3"], "override 'run_dir.x=3': run_dir is the value 'runs/x', not a section"),
    ("broken YAML in an override", ["augment.crop_scale=[0.9"], "'[0.9' is not valid YAML; quote it"),
    ("resume that cannot be", ["resume=must"], "resume: 'must', but runs/x has no checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_bad_pretraining_config_is_one_line_with_its_remedy(
    shapes: Path, tmp_path: Path, overrides: list[str], words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a config that passes by mistake may leave its run
    config = tmp_path / "c.yaml"
    config.write_text(PRETRAIN.replace("DATASET", str(shapes)))
    overrides = [words.replace("DATASET", str(shapes)) for words in overrides]
    assert pretrain(["train", str(config), *overrides]) == 2
    said = capsys.readouterr().err.removeprefix("pretrain: ").strip()
    assert said.startswith(words.replace("DATASET", str(shapes))) or (words.startswith("'") and words in said), said
    assert "\n" not in said and "Traceback" not in said


FILES = [
    ("not YAML", b"a: [1", "not valid YAML"),
    ("a list", b"- 1\n- 2", "a config is a mapping of sections"),
    ("doubled key", b"run_dir: a\nrun_dir: b", "the key 'run_dir' stands twice"),
    ("nothing", b"", "missing; set it in the config or as"),
    ("bytes", b"\xff\xfe\x00", "cannot be read as a text file"),
]


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_a_bad_config_file_is_named(tmp_path: Path, text: bytes, words: str, capsys: Capture) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    assert pretrain(["train", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert pretrain(["train", str(tmp_path / "mime.yaml")]) == 2
    assert "no such config file; did you mean" in capsys.readouterr().err


PROBE = "run_dir: runs/p\npretrained: null\ndata: {dataset: DATASET}\n"
TUNE = "run_dir: runs/t\npretrained: RUN\ndata: {dataset: DATASET}\ntrain: {duration: 1 epochs, global_batch_size: 8}\n"
LATER = [
    ("probe", ["test_split=train"], "data.test_split: 'train' is the training split too; test on another"),
    ("probe", ["lrs=[]"], "lrs: [] has the wrong number of entries"),
    ("probe", ["lrs=[0.1, -1]"], "lrs: [0.1, -1.0] will not do; every learning rate must be above 0"),
    ("probe", ["pretrained=nowhere"], "nowhere: is not there; give a run directory"),
    ("probe", ["holdout_share=1.5"], "holdout_share: 1.5 will not do"),
    ("probe", ["test_split=vall"], "has no split 'vall'; did you mean 'val'?"),
    ("probe", ["optimizer={name: sgd}"], "optimizer: {'name': 'sgd'} is not one of its values"),
    ("probe", ["optimizer=lbfgs", "lrs=[0.1, 0.2]"], "leave them out (lrs=null)"),
    ("probe", ["features_dir=/proc/f"], "features_dir: /proc/f cannot be made"),
    ("tune", ["init=random"], "init: 'random' is not one of its values"),
    ("tune", ["checkpoint.keep_best=true", "data.eval_split=null"], "checkpoint.keep_best: true will not do with data.eval_split"),
    ("tune", [], "nowhere: is not there; give a run directory"),
    ("tune", ["engine.zero_stage=2"], "engine.zero_stage: unknown key"),
]


@pytest.mark.parametrize(("verb", "overrides", "words"), LATER)
def test_a_bad_transfer_config_is_one_line_with_its_remedy(
    shapes: Path, tmp_path: Path, verb: str, overrides: list[str], words: str, capsys: Capture
) -> None:
    config = tmp_path / "c.yaml"
    text = {"probe": PROBE, "tune": TUNE}[verb].replace("DATASET", str(shapes)).replace("RUN", "nowhere")
    config.write_text(text)
    assert finetune([verb, str(config), *overrides]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--source", "foldr", "--out", "x"], "source.kind: 'foldr' is not one of its values; did you mean 'folder'?"),
        (["--source", "folder", "--out", "x"], "source.path: missing; set it in the config or as source.path=VALUE"),
        (["--source", "folder", "--out", "x", "source.path=nowhere"], "source.path: nowhere is not a directory"),
        (["--source", "folder", "--out", ".", "source.path=."], "out: '.' is the source itself, or in it; name another directory"),
        (["--source", "synthetic", "--out", "x", "source.num_clases=3"], "source.num_clases: unknown key; did you mean 'num_classes'?"),
        (["--source", "synthetic", "--out", "x", "encoding=png"], "encoding: 'png' is not one of its values"),
    ],
)  # fmt: skip
def test_a_bad_build_is_one_line_with_its_remedy(
    words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_prep(["build", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("pretrain", ["train bad.yaml", "show bad.yaml", "models", "widths --omega 2^18"]),
        ("finetune", ["probe bad.yaml", "tune bad.yaml"]),
        ("data_prep", ["build bad.yaml", "index bad.yaml"]),
    ],
)
def test_nothing_heavy_is_imported_for_a_list_or_before_a_config_is_known_to_be_good(
    package: str, lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("nonsense: 1\n")
    heavy = ["torch", "torchvision", "timm", "deepspeed", "accelerate", "mlflow", "matplotlib", "scipy"]
    program = f"import sys; from {package}.__main__ import main; codes = [main(line.split()) for line in {lines}]; " + (
        f"print(codes, [name for name in {heavy} if name in sys.modules])"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60, env=environment)
    codes = [2 if line.endswith("bad.yaml") else 0 for line in lines]
    assert done.stdout.endswith(f"{codes} []\n") and done.stderr.count("nonsense: unknown key") == codes.count(2)


def test_the_shipped_configs_are_valid_and_headed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_show_prints_what_reads_back_to_the_same(shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(PRETRAIN.replace("DATASET", str(shapes)))
    assert pretrain(["show", str(config), "model={preset: mixer_b_w, depth: 2}", "optimizer.lr=3e-4"]) == 0
    shown = capsys.readouterr().out
    assert "num_channels: 588" in shown and "lr: 0.0003" in shown
    config.write_text(shown)
    assert pretrain(["show", str(config)]) == 0
    assert capsys.readouterr().out == shown
