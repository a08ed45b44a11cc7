"""Every setting of a pretraining run, with its default and meaning.

Each section checks its own settings. `load_training_data`, `check_against_data` (datasets.py) and
`check_against_ranks` check the settings against the dataset and the ranks, before torch is
imported.

The file is long because it has all settings of a training.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from data_prep.clients import recorded, without_secrets
from data_prep.errors import SettingsError, UserError
from data_prep.local_copy import local_copy
from data_prep.manifest import Filter
from data_prep.settings import Settings
from pretrain.auto_augment import parse_policy
from pretrain.models.presets import NamedModel, OwnModel, expand_preset
from pretrain.models.spec import ModelSpec, check_needs, nearest_divisor
from pretrain.ranks.settings import RanksSettings
from pretrain.record import RecordSettings

Interpolation = Literal["bilinear", "bicubic", "area", "random"]
PaddingMode = Literal["constant", "reflect"]
EraseMode = Literal["const", "rand", "pixel"]
Shuffle = Literal["full", "block", "none"]
LastBatch = Literal["carry", "drop", "pad"]
MixupPairing = Literal["adjacent", "ffcv"]
SinkName = Literal["tensorboard", "wandb"]

REMOTES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "file")
"""URL schemes of checkpoint.remote."""

Unit = Literal["steps", "epochs", "samples"]
_FORM = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*(\w+)\s*")


class Length(NamedTuple):
    amount: Fraction
    unit: Unit

    def steps(self, *, global_batch_size: int, num_samples: int) -> int:
        """Return the smallest number of steps that covers the length."""
        if self.unit == "steps":
            return int(self.amount)
        samples = self.amount * (num_samples if self.unit == "epochs" else 1)
        return math.ceil(samples / global_batch_size)


def parse_length(text: str) -> Length:
    form = _FORM.fullmatch(text)
    unit = (form.group(2).rstrip("s") + "s") if form else ""
    fix = "Write a number and a unit, for example '90 epochs', '5000 steps' or '1_000_000 samples'"
    if form is None or unit not in get_args(Unit):
        raise SettingsError("", f"{text!r} is not a length", fix, code="bad-value")
    count = Fraction(form.group(1))
    if unit == "steps" and count != int(count):
        raise SettingsError("", f"{text!r} is not a whole number", fix, code="bad-value")
    return Length(count, unit)  # type: ignore[arg-type]


def _length(value: object) -> object:
    if isinstance(value, int | float):
        fix = f"Write '{value} steps' or '{value} epochs'"
        raise SettingsError("", f"{value} has no unit", fix, code="bad-value")
    return value if not isinstance(value, str) else parse_length(value) and value


def _nonzero(text: str) -> str:
    if parse_length(text).amount == 0:
        fix = "To turn it off, write an interval longer than the training"
        raise SettingsError("", f"{text!r} is not an interval", fix, code="bad-value")
    return text


Duration = Annotated[str, BeforeValidator(_length), Field(examples=["90 epochs"])]
Cadence = Annotated[
    str, BeforeValidator(_length), AfterValidator(_nonzero), Field(examples=["5 epochs"])
]


_WINDOW = re.compile(r"steps (\d[\d_]*)-(\d[\d_]*)")


def parse_window(text: str) -> range:
    """Return the steps of a window such as 'steps 20-25'. The first step is 1."""
    form = _WINDOW.fullmatch(text)
    steps = range(int(form[1]), int(form[2]) + 1) if form else range(0)
    if not steps or not steps[0]:
        fix = "Write 'steps FIRST-LAST', for example 'steps 20-25'; the first step is 1"
        raise SettingsError("", f"{text!r} is not a range of steps", fix, code="bad-value")
    return steps


def _kept_out(remedy: str) -> AfterValidator:
    """Reject secrets in an address, because config.yaml, MLflow and model cards store it."""
    return AfterValidator(partial(without_secrets, remedy=remedy))


_ELSEWHERE = (
    "set the password or token in data.storage (http: params={NAME: VALUE}), or write ${NAME} in"
    " a stream's address and export WDS_NAME"
)
Address = Annotated[str, _kept_out(_ELSEWHERE), PlainSerializer(recorded, return_type=str)]
"""Address of a dataset. A `pipe:` command in the address is never stored."""
_OF_REMOTE = (
    "set credentials in checkpoint.remote_storage, or in the config of the bucket's own tools"
)
OF_SERVER = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (a database has its own variables,"
    " for example PGPASSWORD)"
)


class MixedDataset(Settings):
    """An additional dataset to train on."""

    dataset: Address = Field(examples=["data/more"])
    """Directory or URL of a dataset that `data_prep build` or `data_prep index` made."""
    split: str = "train"
    """Training split of this dataset."""
    weight: float | None = Field(None, ge=1e-6, le=1000, examples=[0.5])
    """Sampling weight of this dataset, relative to the weights of the other datasets (default: see
    data.weight)."""


class ReadingSettings(Settings):
    """Dataset to read, and cache for remote shards. Every section `data` has these settings."""

    dataset: Address = Field(examples=["data/mine"])
    """Directory or URL of a dataset that `data_prep build` or `data_prep index` made, for example
    gs://bucket/mine."""
    cache_dir: str | None = Field(None, examples=["/scratch/shards"])
    """Directory for copies of remote shards, shared by all ranks and jobs of a node, and for the
    index of a remote dataset. Default: shards in the system's temporary directory, the index in
    ~/.cache/wide-mlps."""
    cache_gb: float = Field(50, gt=0)
    """Size limit of the shard cache in GB. The least recently used shards are removed."""
    storage: dict[str, Any] = Field(default_factory=dict, exclude=True, examples=[{"anon": True}])
    """Options for fsspec, for example {anon: true}, or {endpoint_url: ...} for s3. The options may
    contain secrets and are never stored."""

    @property
    def directory(self) -> Path:
        """Local directory of the dataset. The index of a remote dataset is downloaded first
        (local_copy.py)."""
        return self.directory_of(self.dataset)

    def directory_of(self, dataset: str) -> Path:
        return local_copy(dataset, storage=self.storage, cache_dir=self.cache_dir)


class PixelOrder(Settings):
    """Order of the pixels, in training and in checkpoint metadata."""

    example_with: ClassVar = {"permute": "{}pixel_permutation=0"}
    pixel_permutation: int | None = Field(None, ge=0, examples=[0])
    """Seed of one random permutation of all pixels, applied in training and in every later use of
    the weights. For an MLP the task stays the same. For a Mixer each patch becomes a random set of
    pixels."""
    permute: Literal["after", "before"] = "after"
    """Order of permutation and augmentation. after: permute augmented images. before: augment
    permuted images, so that crops and flips act on unrelated neighbors."""

    @model_validator(mode="after")
    def _order_exists(self) -> Self:
        has_order = self.pixel_permutation is not None
        check_needs(self, "data", {"permute": (has_order, "data.pixel_permutation=0")})
        return self


_OF_A_STREAM = {"stream": "true", "num_classes": "1000", "samples_per_epoch": "1281167"}
_ALSO_OF_A_STREAM = ("channel_mean", "channel_std", "label", "image_member", "eval_dataset")


def _stream_without(setting: str) -> str:
    """Return an example of a stream's settings without `setting`."""
    needed = (
        _OF_A_STREAM
        | {"image_size": "64"}
        | ({} if setting == "eval_dataset" else {"eval_split": "null"})
    )
    return " ".join(f"{{}}{name}={value}" for name, value in needed.items() if name != setting)


class StreamSettings(Settings):
    """Settings of a stream: WebDataset shards, read sequentially through the package webdataset."""

    example_with: ClassVar = {
        name: _stream_without(name) for name in (*_OF_A_STREAM, *_ALSO_OF_A_STREAM)
    }
    stream: bool = False
    """Train on WebDataset shards without an index. `dataset` then lists the shards in webdataset's
    syntax: paths, URLs or `pipe:` shell commands, with ranges {000..146} and the separator `::`. A
    stream has no exact resume and no global shuffle. A config does not store a `pipe:` command,
    only its program name and a hash. Give the command again to resume."""
    num_classes: int | None = Field(None, ge=2, le=1 << 20, examples=[1000])
    """Number of classes of a stream. Labels are numbers from 0 to num_classes - 1."""
    samples_per_epoch: int | None = Field(None, ge=1, examples=[1281167])
    """Number of samples that count as one epoch of a stream. After the last shard, the stream
    starts over."""
    channel_mean: tuple[float, float, float] | None = Field(None, examples=[[0.485, 0.456, 0.406]])
    """Mean of each color channel of a stream, on the scale 0..1 (default: ImageNet's mean)."""
    channel_std: tuple[float, float, float] | None = Field(None, examples=[[0.229, 0.224, 0.225]])
    """Standard deviation of each color channel of a stream, on the scale 0..1 (default: ImageNet's
    standard deviation)."""
    label: str = Field(
        "cls", pattern=r"^(cls|txt|json:[^.]+(\.[^.]+)*)$", examples=["json:meta.label"]
    )
    """File in each sample that holds the label (streams only). cls: a number in KEY.cls. txt: a
    number in KEY.txt. json:FIELD.SUBFIELD: this field of KEY.json. If `eval_dataset` is set, a
    label can also be a class name of `eval_dataset`."""
    image_member: str | None = Field(None, examples=["rgb.png"])
    """File extension of the image (streams only). Required if samples have several images."""
    shuffle_buffer: int = Field(1000, ge=0)
    """Number of undecoded samples in a stream's shuffle buffer, on each rank. data.shuffle=none
    keeps the stream's order."""
    eval_dataset: Address | None = Field(None, examples=["data/theirs"])
    """Indexed dataset whose split `eval_split` is evaluated while a stream trains. A stream itself
    cannot be evaluated."""


class DataSettings(PixelOrder, StreamSettings, ReadingSettings):
    example_with: ClassVar = {"weight": "{}extra_datasets='[{dataset: data/more, weight: 1}]'"}
    train_split: str = "train"
    """Split to train on."""
    eval_split: str | None = "val"
    """Split for evaluations during training. null: no evaluations."""
    fold: int | None = Field(None, ge=0, examples=[0])
    """Number of the fold to train on, if the split has folds (STL-10's `train` has ten folds of
    1,000 images). Default: all samples."""
    extra_datasets: tuple[MixedDataset, ...] = Field((), examples=[[{"dataset": "data/more"}]])
    """Additional datasets to train on. Evaluations use only `dataset`."""
    weight: float | None = Field(None, ge=1e-6, le=1000, examples=[2.0])
    """Sampling weight of `dataset`, relative to the weights in `extra_datasets`. Default: all
    samples are equally frequent."""
    shuffle: Shuffle = "full"
    """Order of the samples in an epoch. full: shuffle all samples. block: shuffle blocks of
    neighboring samples, for slow disks. none: keep the stored order."""
    block_size: int = Field(1024, ge=1)
    """Number of neighboring samples that are read together as a block (shuffle=block only)."""
    window_blocks: int = Field(16, ge=1)
    """Number of blocks whose samples are mixed with each other (shuffle=block only)."""
    canonical_streams: int = Field(1, ge=1)
    """Number of ranges into which the samples are divided. Each range has its own sample order.
    Every batch takes an equal part from each range, so batches do not depend on the number of
    nodes. Choose a multiple of the largest number of nodes: each node then reads only its own
    ranges. If the ranges of a node exceed its cache, add data.shuffle=block and set data.block_size
    to the number of samples in a shard. 1: one order of all samples."""
    last_batch: LastBatch = "carry"
    """Rule for the last batch of an epoch if the samples do not fill it. carry: fill the batch from
    the next epoch. drop: skip the batch. pad: repeat samples of the epoch."""
    image_size: int | None = Field(None, ge=8, le=1024, examples=[64])
    """Input size of the model in pixels (default: the dataset's size)."""
    max_bad_fraction: float = Field(0.001, ge=0, le=1)
    """Fraction of an epoch's samples that may fail to decode before the run stops. Other samples
    replace the failed samples."""
    verify_hashes: Literal["on_first_read", "never"] = "on_first_read"
    """Check of the shards' hashes. on_first_read: hash each shard once per run, in the background,
    and stop the run at the first shard that differs from the manifest. Checkpoints do not wait for
    this check. never: do not check shards that are read in place (copies are always checked)."""
    stage_dir: str | None = Field(None, examples=["/scratch"])
    """Directory on each node's own disk to which shards are copied before training. If the disk is
    too full, training prints a warning and reads the original shards. Remote shards use `cache_dir`
    instead."""

    @model_validator(mode="after")
    def _mixture_fits(self) -> "DataSettings":
        weights = [self.weight, *(other.weight for other in self.extra_datasets)]
        if None in weights and any(weight is not None for weight in weights):
            raise SettingsError(
                "data.weight",
                "some datasets have a weight and others have none",
                "set a weight for `dataset` and for each of data.extra_datasets, or no weights",
                code="conflict",
            )
        is_single = not self.extra_datasets, "data.extra_datasets=[]"
        needs = {"weight": (bool(self.extra_datasets), "data.extra_datasets"), "fold": is_single}
        needs |= {"last_batch": is_single}
        is_divisible = is_single if self.extra_datasets else (self.fold is None, "data.fold=null")
        check_needs(self, "data", needs | {"canonical_streams": is_divisible})
        return self

    @model_validator(mode="after")
    def _stream_is_described(self) -> "DataSettings":
        others = ("extra_datasets", "fold", "stage_dir", "last_batch", "canonical_streams")
        needs = dict.fromkeys(StreamSettings.model_fields, (self.stream, "data.stream=true"))
        needs |= dict.fromkeys(others, (not self.stream, "data.stream=false"))
        check_needs(self, "data", needs)
        if not self.stream:
            return self
        needed = {"num_classes": 1000, "samples_per_epoch": 1281167, "image_size": 64}
        for name, example in needed.items():
            if getattr(self, name) is None:
                raise SettingsError(
                    f"data.{name}",
                    "a stream needs a value",
                    f"set data.{name}, for example {example}",
                    code="missing-value",
                )
        if (self.eval_split is None) != (self.eval_dataset is None):
            problem = f"{self.eval_split} needs data.eval_dataset, because a stream has no splits"
            fix = "set data.eval_dataset, or data.eval_split=null for no evaluation"
            if self.eval_split is None:
                problem = "null is not valid with data.eval_dataset"
                fix = "set data.eval_split, or remove data.eval_dataset"
            raise SettingsError("data.eval_split", problem, fix, code="conflict")
        return self

    @property
    def datasets(self) -> tuple[str, ...]:
        """Addresses of all training datasets, or of `eval_dataset` for a stream."""
        if not self.stream:
            return (self.dataset, *(other.dataset for other in self.extra_datasets))
        return () if self.eval_dataset is None else (self.eval_dataset,)


class AugmentSettings(Settings):
    """Augmentation in timm's order: crop, flip, auto-augment, normalize, random erasing, then MixUp
    or CutMix."""

    crop_scale: tuple[float, float] | None = Field(None, examples=[[0.4, 1.0]])
    """Range of areas of random resized crops, as fractions of the image. null: use the complete
    image, or its central square if the dataset was built with crop=full."""
    crop_ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    """Range of aspect ratios (width / height) of random resized crops."""
    crop_interpolation: Interpolation | None = Field(None, examples=["bicubic"])
    """Filter for resizing crops and evaluation images. bilinear and bicubic are antialiased. area
    is OpenCV's INTER_AREA, as in FFCV. random draws bilinear or bicubic per image, as timm does,
    and uses bicubic for evaluation. Default: the loaded checkpoint's filter, otherwise bilinear."""
    eval_crop: float | None = Field(None, gt=0, le=1, examples=[0.875])
    """Side of the central square for evaluation, as a fraction of the image's side (timm's
    crop_pct). 0.875 is 224 of 256 px. Default: the loaded checkpoint's value, otherwise 1."""
    crop_padding: int = Field(0, ge=0, le=1024)
    """Pixels of padding on each side before a random crop of the stored size (4 is usual for 32
    px). 0: off. Images that crop=full squashed to squares stay squashed."""
    padding_mode: PaddingMode = "constant"
    """Content of the padding. constant: black. reflect: mirror the image."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    auto_augment: str | None = Field(None, examples=["rand-m9-mstd0.5-inc1"])
    """Augmentation policy by timm's name: original, originalr, v0, v0r, or RandAugment such as
    rand-m9-mstd0.5-inc1 (keys m, n, p, mstd, mmax, inc, tweights). cifar10 is torchvision's policy
    for CIFAR."""
    erase_probability: float = Field(0.0, ge=0, le=1)
    """Probability of random erasing. 0: off."""
    erase_mode: EraseMode = "pixel"
    """Content of erased blocks. const: mean color. rand: one random color. pixel: noise."""
    erase_count: int = Field(1, ge=1, le=100)
    """Largest number of erased blocks per image. All blocks together have the area of a single
    block."""
    mixup_alpha: float = Field(0.0, ge=0)
    """Alpha of MixUp: images of a batch are mixed with lambda ~ Beta(alpha, alpha). 0: off."""
    cutmix_alpha: float = Field(0.0, ge=0)
    """Alpha of CutMix: images of a batch are mixed with lambda ~ Beta(alpha, alpha). 0: off."""
    mixup_pairing: MixupPairing = "adjacent"
    """Partners of mixed images. adjacent: mix images 1 and 2, 3 and 4, and so on, with one lambda
    per pair. ffcv: mix each image with the previous image of the global batch, with one lambda per
    batch (FFCV and the code of Scaling MLPs)."""
    mix_probability: float = Field(1.0, ge=0, le=1)
    """Probability that a pair (or a batch, see mixup_pairing) is mixed."""
    switch_probability: float = Field(0.5, ge=0, le=1)
    """Probability of CutMix instead of MixUp, if both are on."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "AugmentSettings":
        for name, bounds, top in (
            ("crop_scale", self.crop_scale, 1.0),
            ("crop_ratio", self.crop_ratio, 10.0),
        ):
            if bounds is not None and not 0 < bounds[0] <= bounds[1] <= top:
                raise SettingsError(
                    f"augment.{name}",
                    f"{list(bounds)} is not valid",
                    f"write [low, high] with 0 < low <= high <= {top:g}",
                    code="bad-value",
                )
        needs = {"crop_padding": (self.crop_scale is None, "augment.crop_scale=null")}
        check_needs(self, "augment", needs)
        if self.auto_augment is not None:
            parse_policy(self.auto_augment)
        return self

    @property
    def is_crop_flip_mixup(self) -> bool:
        """True if only crop (bilinear or area), flip and MixUp are on. One pass then computes all
        three."""
        others = self.crop_padding or self.auto_augment or self.erase_probability > 0
        return (
            not others
            and self.crop_interpolation in (None, "bilinear", "area")
            and "CutMix" not in self.mixing
        )

    @property
    def mixes_pairs(self) -> bool:
        return bool(self.mixing) and self.mixup_pairing == "adjacent"

    @property
    def mixes_previous(self) -> bool:
        return bool(self.mixing) and self.mixup_pairing == "ffcv"

    @property
    def plain_filter(self) -> Filter:
        chosen = self.crop_interpolation
        return "bicubic" if chosen == "random" else chosen or "bilinear"

    @property
    def plain_crop(self) -> float:
        """Side of the central crop as a fraction of the image's side, for images without
        augmentation."""
        return self.eval_crop or 1.0

    def fed_as(self, filter_: Filter, eval_crop: float) -> Self:
        """Return these settings, with a checkpoint's filter and crop as defaults."""
        own: dict[str, Any] = {"crop_interpolation": self.crop_interpolation or filter_}
        if eval_crop != 1:
            own["eval_crop"] = self.eval_crop or eval_crop
        return self.model_copy(update=own)

    @property
    def recipe(self) -> str:
        """Text with the settings that differ from no augmentation, and their values."""
        plain = AugmentSettings(flip_probability=0).fed_as("bilinear", 1.0).model_dump(mode="json")
        fed = self.fed_as("bilinear", 1.0).model_dump(mode="json")
        return (
            ", ".join(f"{name} {value}" for name, value in fed.items() if value != plain[name])
            or "no augmentation"
        )

    @property
    def mixing(self) -> dict[str, str]:
        """Active mixing methods (MixUp, CutMix), each with the setting that turns it off."""
        ways = {
            "MixUp": ("mixup_alpha", self.mixup_alpha),
            "CutMix": ("cutmix_alpha", self.cutmix_alpha),
        }
        return {
            name: field
            for name, (field, alpha) in ways.items()
            if alpha > 0 and self.mix_probability > 0
        }


class OptimizerSettings(Settings):
    example_with: ClassVar = {"nesterov": "{}name=sgd"}
    name: Literal["lion", "adamw", "sgd"] = "lion"
    """Optimizer. The papers' MLPs use lion."""
    lr: float = Field(1e-4, gt=0)
    """Largest learning rate, reached at the end of the warm-up."""
    weight_decay: float = Field(1e-3, ge=0)
    """Decoupled weight decay. Each step shrinks the weights by the fraction learning rate x
    weight_decay, independent of the gradient."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay. matrices: only matrices. all: also norms and biases, as in the
    code of Scaling MLPs."""
    betas: tuple[float, float] | None = Field(None, examples=[[0.9, 0.99]])
    """Momentum coefficients of Lion or AdamW (default: 0.9, 0.99 for lion; 0.9, 0.999 for
    adamw)."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum (SGD only)."""
    nesterov: bool = True
    """Use Nesterov momentum (SGD only), as in the Mixer paper but not in the code of Scaling MLPs.
    """
    head_lr_scale: float = Field(1.0, gt=0)
    """Factor by which the classifier's learning rate is multiplied."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Learning rate of each layer, as a fraction of the learning rate of the layer after it, from
    the last block to the stem. 1: off."""

    @model_validator(mode="after")
    def _betas_fit(self) -> "OptimizerSettings":
        is_sgd = self.name == "sgd"
        needs = {
            "betas": (not is_sgd, "optimizer.name=lion"),
            "momentum": (is_sgd, "optimizer.name=sgd"),
            "nesterov": (is_sgd, "optimizer.name=sgd"),
        }
        check_needs(self, "optimizer", needs)
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(
                "optimizer.betas",
                f"{list(self.betas)} is not valid",
                "write numbers in [0, 1), for example [0.9, 0.99]",
                code="bad-value",
            )
        return self


class ScheduleSettings(Settings):
    example_with: ClassVar = {"warmup_from": "{}warmup='5 epochs'", "cooldown": "{}name=wsd"}
    name: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up. constant: unchanged. cosine, linear: decay to
    final_lr. wsd (warm-up, stable, decay): constant, then linear decay during the cooldown."""
    warmup: Duration = Field("0 steps", examples=["5 epochs"])
    """Length of the linear warm-up to optimizer.lr. If it is not shorter than the run, the warm-up
    is a tenth of the run."""
    warmup_from: float | None = Field(None, ge=0, examples=[1e-06])
    """Learning rate of the first step (default: optimizer.lr / (warm-up steps + 1))."""
    final_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of cosine, linear and wsd."""
    cooldown: Duration = Field("0 steps", examples=["10 epochs"])
    """Length of the decay at the end of wsd. Runs of several lengths can share the constant part
    before the cooldown (see start_from)."""


def _number_or_auto(value: object) -> object:
    """Report a bad value once. pydantic would report it once per allowed type."""
    if value in (None, "auto") or (type(value) is int and value >= 1):
        return value
    fix = "Write a whole number from 1, or auto"
    raise SettingsError("", f"{value!r} is not valid", fix, code="bad-value")


class TrainSettings(Settings):
    short_words: ClassVar[Mapping[str, tuple[str, str]]] = {"epochs": ("duration", "{} epochs")}

    duration: Duration
    """Length of the training. epochs=N on the command line means duration='N epochs'."""
    global_batch_size: int = Field(1024, ge=1)
    """Number of samples in one optimizer step, over all ranks."""
    local_batch_size: Annotated[int | Literal["auto"] | None, BeforeValidator(_number_or_auto)] = (
        Field(None, examples=["auto", 64])
    )
    """Number of samples in a micro-batch of one rank (default: all samples that the rank has in a
    step). auto: halve the default until a step fits into memory, when the run begins. The global
    batch stays the same."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing: fraction of the target that is spread over all classes. 0: off."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the sample order and the augmentation."""
    eval_every: Cadence = "1 epochs"
    """Interval between evaluations on data.eval_split. The last step is also evaluated."""
    log_every_steps: int = Field(10, ge=1)
    """Number of steps between two logged values of loss, learning rate and throughput."""
    max_skipped_steps: int = Field(20, ge=1)
    """Number of consecutive steps with a non-finite loss or gradient after which the run stops and
    names the samples. Until then such steps are skipped."""
    loader_threads: int | None = Field(None, ge=1, examples=[4])
    """Number of threads per rank that decode images (default: number of cores per rank)."""
    prefetch_batches: int = Field(4, ge=1)
    """Number of micro-batches that each rank loads in advance."""
    ema_decay: float | None = Field(None, gt=0, lt=1, examples=[0.9999])
    """Decay of an exponential moving average of the weights. The average is evaluated and published
    instead of the weights."""


class PassSettings(RanksSettings):
    """Engine settings of pretraining and fine-tuning."""

    gradient_clip_norm: float = Field(0.0, ge=0)
    """Largest norm of the gradient. Longer gradients are scaled down. 0: off."""
    activation_checkpointing: bool = False
    """Store only the input of each block, and recompute activations in the backward pass. This
    needs less memory and about a third more compute."""
    compile: bool = False
    """Compile the model block by block with torch.compile. The first step takes a minute or more.
    Later steps are faster on GPUs, but hardly on CPUs."""


class EngineSettings(PassSettings):
    zero_stage: Literal[0, 1, 2, 3] = 1
    """State that ZeRO divides over the ranks. 0: nothing. 1: optimizer state. 2: also gradients. 3:
    also weights."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """Precision of forward and backward passes. tf32: fp32 storage, but GPUs multiply with a 10-bit
    mantissa. fp16: uses a dynamic loss scale, and skips steps that overflow."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State that is kept in CPU memory instead of GPU memory. optimizer: optimizer state and update
    (ZeRO stages 1 to 3). all: also weights (stage 3)."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "EngineSettings":
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        needs = {
            "compile": (self.zero_stage < 3, "engine.zero_stage=2"),
            "offload": (self.zero_stage >= least, f"engine.zero_stage={least}"),
        }
        check_needs(self, "engine", needs)
        return self


class CheckpointSettings(Settings):
    example_with: ClassVar = {"remote_storage": "{}remote=s3://bucket/run"}
    every: Cadence = "1 epochs"
    """Interval between checkpoints. Training also saves a checkpoint at its end."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. If the newest checkpoint is damaged, training resumes
    from the previous one."""
    keep_every: Cadence | None = Field(None, examples=["50 epochs"])
    """Interval between checkpoints that are kept forever."""
    milestones: tuple[Duration, ...] = Field((), examples=[["50 epochs", "100 epochs"]])
    """Training lengths at which a checkpoint is saved and kept forever. RUN@50epochs selects the
    checkpoint at 50 epochs. If the learning rate is constant, the checkpoint equals, bit for bit,
    the last checkpoint of a run of that length."""
    keep_best: bool | None = None
    """Save a checkpoint at each evaluation with the highest top-1 accuracy so far, and keep it
    until a better checkpoint replaces it (RUN/checkpoints/best.json). Default: on if
    data.eval_split is set."""
    remote: Annotated[str, _kept_out(_OF_REMOTE)] | None = Field(
        None, examples=["s3://bucket/runs/mine"]
    )
    """Folder in a bucket (s3, gs, az, file) for this run only. Checkpoints, event log and config
    are uploaded in the background. A resume fetches the newest complete checkpoint, so run_dir may
    be on each node's own disk."""
    remote_storage: dict[str, Any] = Field(
        default_factory=dict, exclude=True, examples=[{"endpoint_url": "https://minio:9000"}]
    )
    """Options for fsspec, as in data.storage. The options may contain secrets and are never stored.
    """
    grace_s: float = Field(30.0, ge=1)
    """Seconds between SIGTERM and SIGKILL (Kubernetes: 30, most spot instances: 120). A stopped run
    uses this time to upload its last checkpoint. If the upload is incomplete, a resume on another
    disk begins at an earlier checkpoint."""

    @model_validator(mode="after")
    def _remote_is_a_bucket(self) -> Self:
        kind, _, place = (self.remote or "s3://run").partition("://")
        field = "checkpoint.remote"
        if kind not in REMOTES or not place.strip("/"):
            fix = "Write s3://BUCKET/RUN, or use gs, az or file instead of s3"
            raise UserError(field, f"{self.remote!r} is not a bucket", fix, code="bad-value")
        if "?" in place:
            fix = "Remove the part of the address that begins with ?"
            raise UserError(field, "a query (?...) is not supported", fix, code="bad-value")
        # an explicit remote=null also allows remote_storage
        is_named = self.remote is not None or "remote" in self.model_fields_set
        check_needs(self, "checkpoint", {"remote_storage": (is_named, field)})
        return self


class TrackingSettings(Settings):
    enabled: bool = True
    """Send metrics and results to MLflow. The event log is written in any case."""
    experiment: str = "wide-mlps"
    """MLflow experiment of the run."""
    uri: Annotated[str, _kept_out(OF_SERVER)] | None = Field(
        None, examples=["sqlite:///runs/mlflow.db"]
    )
    """MLflow database or server. Default: MLFLOW_TRACKING_URI, otherwise mlflow.db next to the run
    directory (`finetune`: the database of the run that trained the weights)."""
    sinks: tuple[SinkName, ...] = Field((), examples=[["tensorboard"]])
    """Other tools for which the run writes files to RUN/tracking. `pretrain sync RUN --to TOOL`
    writes the files after the run."""
    peak_teraflops: float | None = Field(None, gt=0, examples=[312.0])
    """Peak TFLOP/s of one rank's device, to compute MFU. Default: the value in the data sheet of a
    known GPU, otherwise a measured value."""

    @model_validator(mode="after")
    def _sinks_can_be_written(self) -> Self:
        check_installed(*self.sinks)
        check_needs(self, "tracking", {"sinks": (self.enabled, "tracking.enabled=true")})
        return self


class TrainingTracking(TrackingSettings):
    profile: Annotated[str, AfterValidator(lambda text: parse_window(text) and text)] | None = (
        Field(None, examples=["steps 20-25"])
    )
    """Steps that each rank traces to RUN/profile, for Perfetto. Traced steps are slower, but the
    weights stay the same. A resume does not trace earlier steps."""


def check_installed(*sinks: str) -> None:
    modules = {"wandb": "wandb", "tensorboard": "tensorboardX"}
    for sink in sinks:
        if find_spec(modules[sink]) is None:
            raise UserError(
                "sinks",
                f"{modules[sink]} is not installed",
                f"run pip install 'wide-mlps[{sink}]'",
                code="missing-library",
            )


Resume = Literal["auto", "must", "never", "changed_code"]


class TrainingSettings(Settings):
    """Settings of pretraining and of fine-tuning."""

    removed: ClassVar = {"engine.cuda_graphs": False}
    run_dir: str = Field(examples=["runs/mine"])
    """Directory of the run: checkpoints, event log and config. The same command resumes the run."""
    resume: Resume = "auto"
    """Rule for a resume. auto: resume from a checkpoint if there is one. must: fail without a
    checkpoint. never: fail if there is a checkpoint. changed_code: same as auto, but also resume if
    the code of model.import has changed."""
    data: DataSettings
    augment: AugmentSettings = AugmentSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    train: TrainSettings
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrainingTracking = TrainingTracking()
    record: RecordSettings = RecordSettings()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        is_ordered = not (self.data.stream and self.augment.mixes_previous)
        check_needs(self.augment, "augment", {"mixup_pairing": (is_ordered, "data.stream=false")})
        check_against_ranks(self.train, self.augment, num_ranks=1)
        self._check_canonical_streams()
        check_schedule(self.schedule, self.optimizer.lr)
        is_known = self.data.eval_split is not None or not self.checkpoint.keep_best
        check_needs(self.checkpoint, "checkpoint", {"keep_best": (is_known, "data.eval_split")})
        return self

    def _check_canonical_streams(self) -> None:
        streams, batch = self.data.canonical_streams, self.train.global_batch_size
        is_ordered = not (streams > 1 and self.augment.mixes_previous)
        check_needs(
            self.augment, "augment", {"mixup_pairing": (is_ordered, "data.canonical_streams=1")}
        )
        unit = 2 if self.augment.mixes_pairs else 1
        if batch % (streams * unit):
            nearest = nearest_divisor(batch // unit, streams)
            raise SettingsError(
                "data.canonical_streams",
                f"a batch of {batch} cannot be divided into {streams} equal parts"
                + " of complete pairs for mixing" * (unit - 1),
                f"set data.canonical_streams={nearest}, or another train.global_batch_size",
                code="mismatch",
            )


class PretrainSettings(TrainingSettings):
    of_verb = "pretrain train"
    start_from: str | None = Field(None, examples=["runs/mine"])
    """Run, checkpoint, folder of weights, or hf-hub:USER/NAME to begin with. The model must be the
    same. The head is loaded if the classes are the same. RUN@50epochs also continues the optimizer
    and the data position. Use it to branch a run with another schedule or length. A resume does not
    read start_from again."""
    model: Annotated[
        ModelSpec,
        BeforeValidator(expand_preset, json_schema_input_type=NamedModel | OwnModel | ModelSpec),
    ]
    """Architecture: a named model (`preset`, see `pretrain models`), a class of your own
    (`import`), or a `kind` and its sizes."""
    engine: EngineSettings = EngineSettings()


def check_schedule(schedule: ScheduleSettings, lr: float, *, field: str = "optimizer.lr") -> None:
    first_lr, final_lr = schedule.warmup_from, schedule.final_lr
    if final_lr > lr:
        raise SettingsError(
            "schedule.final_lr",
            f"{final_lr} is above {field} {lr}",
            f"set at most {lr}, because {schedule.name} only lowers the learning rate",
            code="conflict",
        )
    is_wsd, cools = schedule.name == "wsd", parse_length(schedule.cooldown).amount > 0
    needs = {
        "final_lr": (schedule.name != "constant", "schedule.name=cosine"),
        "warmup_from": (parse_length(schedule.warmup).amount > 0, "schedule.warmup='5 epochs'"),
        "cooldown": (is_wsd or not cools, "schedule.name=wsd"),
    }
    check_needs(schedule, "schedule", needs)
    if is_wsd and not cools:
        problem, fix = "wsd needs a cooldown", "set a length, for example '10 epochs'"
        raise SettingsError("schedule.cooldown", problem, fix, code="conflict")
    if first_lr is not None and first_lr > lr:
        raise SettingsError(
            "schedule.warmup_from",
            f"{first_lr} is above {field} {lr}",
            f"set at most {lr}, because a warm-up only raises the learning rate",
            code="conflict",
        )


def check_against_ranks(train: TrainSettings, augment: AugmentSettings, *, num_ranks: int) -> int:
    """Check the batch sizes, and return the local batch size for `num_ranks` ranks. For `auto`,
    return all samples of a rank in a step; a divisor is chosen later."""
    whole = train.global_batch_size
    if whole % num_ranks:
        low, high = whole // num_ranks * num_ranks, -(-whole // num_ranks) * num_ranks
        near = f"{low} or {high}" if low else f"{high}"
        raise SettingsError(
            "train.global_batch_size",
            f"{whole} is not divisible by {num_ranks} ranks",
            f"set {near}",
            code="conflict",
        )
    share = whole // num_ranks
    local = train.local_batch_size if isinstance(train.local_batch_size, int) else share
    if share % local:
        fault = (
            f"{local} does not divide the {share} samples of a rank (global_batch_size {whole} on"
            f" {num_ranks} ranks)"
        )
        raise SettingsError(
            "train.local_batch_size",
            fault,
            f"set {nearest_divisor(share, local)}",
            code="bad-value",
        )
    if augment.mixes_pairs and local % 2:
        raise SettingsError(
            "train.local_batch_size",
            f"{local} samples per rank cannot form pairs for {' and '.join(augment.mixing)}",
            "set an even number",
            code="conflict",
        )
    return local
