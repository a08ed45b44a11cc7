"""The recipe of each config of the papers, as `show` resolves it. Each line is a fact that a paper
or its public code states, with its section (docs/papers.md, "Recipes")."""

import pytest
import yaml

from cluster.work import Kind, Work
from data_prep.settings import flatten
from tests.ranks import REPOSITORY

KINDS: dict[str, Kind] = {
    "pretrain": "pretrain",
    "finetune": "tune",
    "probe": "probe",
    "evaluate": "evaluate",
}
FACTS = yaml.safe_load("""
pretrain/imagenet21k_b12_wi1024_paper:
  Scaling MLPs, table of models: {model.depth: 12, model.width: 1024, model.expansion: 4,
    model.bottleneck: inverted}
  Scaling MLPs 3, blocks: {model.activation: gelu, model.norm: layer, model.norm_place: before}
  Scaling MLPs, pretraining: {optimizer.name: lion, train.duration: 400 epochs,
    train.global_batch_size: 16384, train.label_smoothing: 0.3, augment.mixup_alpha: 0.8,
    augment.flip_probability: 0.5}
  Scaling MLPs, scaling-law runs: {optimizer.lr: 1.0e-05, optimizer.weight_decay: 0.001}
  public code: {schedule.name: constant, augment.crop_scale: [0.08, 1], augment.mixup_pairing:
    ffcv, optimizer.decay: all}
pretrain/imagenet21k_b12_wi1024_public:
  public code, README: {train.global_batch_size: 16384, train.duration: 800 epochs}
  public code, defaults: {optimizer.name: lion, optimizer.lr: 5.0e-05, optimizer.weight_decay: 0,
    train.label_smoothing: 0.3, augment.mixup_alpha: 0.8, engine.gradient_clip_norm: 0}
  public code, loader: {augment.crop_scale: [0.08, 1], augment.crop_ratio: [0.75,
    1.3333333333333333], augment.crop_interpolation: area, augment.mixup_pairing: ffcv,
    data.last_batch: drop}
  public code: {engine.precision: tf32, schedule.name: constant, data.dataset:
    data/imagenet21k-64-public}
pretrain/imagenet1k_b6_wi1024_scratch:
  Scaling MLPs, Table 1: {model.depth: 6, model.width: 1024, train.duration: 1000 epochs}
  Scaling MLPs, 4.2: {optimizer.name: lion, optimizer.lr: 5.0e-05, train.label_smoothing: 0.3}
  Scaling MLPs, 4.1: {data.image_size: 64}
  Scaling MLPs, A.4: {augment.mixup_alpha: 0.8}
  public code, defaults: {optimizer.weight_decay: 0, train.global_batch_size: 4096, schedule.name:
    constant, augment.crop_scale: [0.08, 1]}
pretrain/cifar10_resnet18:
  Scaling MLPs, Table 1: {model.name: resnet18_32, data.image_size: null}
pretrain/imagenet1k_resnet18:
  Scaling MLPs, Table 1: {model.name: resnet18_224, data.image_size: 224}
pretrain/imagenet1k_mixer_b_w:
  Mixer paper, Table 1: {model.patch_size: 14, model.num_channels: 588, model.depth: 8,
    model.expansion: 4.0948, data.image_size: 224}
  Mixer paper, C.5: {optimizer.name: adamw, optimizer.lr: 0.001, optimizer.weight_decay: 0.05,
    train.duration: 300 epochs, train.global_batch_size: 4096, schedule.warmup: 5 epochs,
    schedule.warmup_from: 1.0e-06, schedule.name: cosine, schedule.final_lr: 1.0e-05,
    augment.erase_probability: 0.25, augment.mixup_alpha: 0.8, augment.auto_augment:
    rand-m9-mstd0.5-inc1, augment.cutmix_alpha: 1, augment.switch_probability: 0.5,
    train.label_smoothing: 0.1}
pretrain/cifar10_smixer:
  Mixer paper, C.4: {optimizer.name: sgd, optimizer.lr: 0.02, optimizer.momentum: 0.9,
    optimizer.nesterov: true, schedule.name: cosine, train.global_batch_size: 128, train.duration:
    200 epochs, augment.crop_padding: 4, augment.flip_probability: 0.5, augment.auto_augment:
    null, model.patch_size: 4, model.depth: 8, model.layers_per_mixing: 1, model.num_tokens: 113,
    model.num_channels: 32}
  Mixer paper: {engine.precision: fp32}
pretrain/cifar10_mixer_ss_w:
  Mixer paper, Table 1: {optimizer.name: adamw, optimizer.lr: 0.04, train.global_batch_size: 1024,
    train.duration: 4000 epochs, schedule.name: cosine, augment.auto_augment: cifar10,
    model.patch_size: 4, model.num_channels: 487, model.depth: 2, model.expansion: 4}
  default of torch.optim.AdamW: {optimizer.weight_decay: 0.01, optimizer.decay: all}
  Mixer paper: {engine.precision: fp32}
pretrain/mnist_monarch:
  Mixer paper, Fig. 2d: {optimizer.name: adamw, optimizer.lr: 0.01, schedule.name: cosine,
    train.duration: 200 epochs, model.form: monarch}
  default of torch.optim.AdamW: {optimizer.weight_decay: 0.01, optimizer.decay: all}
finetune/cifar10_b12_wi1024_paper:
  Scaling MLPs 4.3: {optimizer.name: sgd, optimizer.lr: 0.001, optimizer.head_lr_scale: 10,
    train.duration: 50 epochs, seeds: [0, 1, 2]}
  public code: {schedule.name: constant, engine.gradient_clip_norm: 1, optimizer.weight_decay: 0,
    optimizer.nesterov: false, optimizer.momentum: 0.9, head_init: torch, channel_stats: target}
finetune/cifar10_b12_wi1024_public:
  public code, README: {train.duration: 100 epochs, train.global_batch_size: 2048,
    augment.crop_scale: [0.4, 1], augment.crop_ratio: [1, 1], train.label_smoothing: 0.3,
    augment.mixup_alpha: 0}
  public code: {optimizer.lr: 0.001, optimizer.head_lr_scale: 10, optimizer.weight_decay: 0,
    optimizer.nesterov: false, schedule.name: constant, head_init: torch,
    engine.gradient_clip_norm: 1, channel_stats: target, data.last_batch: drop}
probe/cifar10_b12_wi1024_paper:
  Scaling MLPs A.3: {optimizer: lion, lrs: [1.0e-05], epochs: [50], standardize: false, num_views: 50}
  public code: {schedule.name: constant, label_smoothing: 0.3, gradient_clip_norm: 1, batch_size:
    4096, weight_decays: [0], channel_stats: target}
evaluate/cifar10_b12_wi1024_public:
  public code, README: {num_views: 100, include_plain: false, data.split: test}
""")


@pytest.mark.parametrize("name", FACTS)
def test_a_recipe_has_the_values_that_are_stated(name: str) -> None:
    kind = KINDS[name.partition("/")[0]]
    settings = Work(kind, str(REPOSITORY / f"configs/{name}.yaml")).settings
    resolved = flatten(settings.model_dump(mode="json"))
    for section, values in FACTS[name].items():
        assert {key: resolved[key] for key in values} == values, section


def test_every_config_but_the_demo_has_facts() -> None:
    folders = [(kind, REPOSITORY / "configs" / kind) for kind in KINDS]
    files = {f"{kind}/{path.stem}" for kind, folder in folders for path in folder.glob("*.yaml")}
    assert {name for name in files if "demo" not in name} == set(FACTS)
