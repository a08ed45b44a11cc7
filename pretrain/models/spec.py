"""Settings of the models, validated without torch.

The letters are from the papers: S tokens (S0 = number of patches), C channels, m = S C the
effective width. gamma (`expansion`) is the hidden width of a mixing layer as a multiple of its
input width.
"""

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from data_prep.errors import SettingsError
from data_prep.settings import Settings

Activation = Literal["gelu", "relu", "silu", "tanh", "identity"]
_OfLayers = Annotated[Activation, Field(description="Activation function.")]
_OfMatrices = Annotated[
    bool, Field(description="Use a bias in every matrix. The classifier always has a bias.")
]
_ZEROED = "Fraction of hidden entries that training sets to zero. 0: off."
_Dropout = Annotated[float, Field(ge=0, lt=1, description=_ZEROED)]
Init = Literal["normal", "torch"]
EXPANSION = 4.0
TIMM_NORM_EPS = 1e-6


def check_needs(section: Settings, prefix: str, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Raise SettingsError if a setting is not its default although its requirement is not met.
    `needs`: for each setting, True if the requirement is met, and a setting that meets it."""
    for name, (is_met, need) in needs.items():
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if not is_met and getattr(section, name) != default:
            field = f"{prefix}.{name}"
            fix = f"set {need}, or remove {field}"
            raise SettingsError(field, f"the value needs {need}", fix, code="conflict")


def _block_numbers(given: object) -> object:
    if isinstance(given, list | tuple) and all(type(each) is int for each in given):
        return tuple(given)
    if given != "all":
        raise SettingsError(
            "model.permuted_blocks",
            f"{given!r} is not valid",
            "write block numbers, for example [0, 3], or all",
            code="bad-value",
        )
    return given


BlockNumbers = Annotated[
    Literal["all"] | tuple[int, ...],
    BeforeValidator(_block_numbers, json_schema_input_type=Literal["all"] | list[int]),
]


class Spec(Settings):
    def check(self, *, image_size: int) -> None:
        """Raise an error if the model does not support this image size. The default is to support
        any size."""


class MlpSpec(Spec):
    """The MLP of *Scaling MLPs*: Linear(3 H W, width), `depth` layers (with an inverted bottleneck
    of two matrices), Linear(width, classes)."""

    example_with: ClassVar = {"activation_first": "{}bottleneck=none"}
    kind: Literal["mlp"]
    depth: int = Field(6, ge=1)
    """Number of layers between the first and the last layer."""
    width: int = Field(1024, ge=1)
    """Number of entries of the hidden vector."""
    expansion: float = Field(EXPANSION, gt=0)
    """Hidden width of a block, as a multiple of `width` (inverted bottleneck only)."""
    bottleneck: Literal["inverted", "none"] = "inverted"
    """Structure of a block. inverted: z + Wc act(We norm(z)), the B-L/Wi-m models. none: act(W
    norm(z)), the standard MLP."""
    activation_first: bool = False
    """Position of the activation (standard MLP only). true: W act(norm(z)), as in the public code.
    false: act(W norm(z)), as in the paper."""
    norm: Literal["layer", "batch", "none"] = "layer"
    """Norm of each layer: LayerNorm, BatchNorm or none."""
    norm_place: Literal["before", "after"] = "before"
    """Position of the norm. before: pre-LN, before the layer. after: post-LN, after the skip path
    is added."""
    skip_every: int | None = Field(None, ge=0, examples=[2])
    """Number of layers that each skip path spans; 0: no skip paths. Default: 1 with an inverted
    bottleneck, otherwise 0."""
    activation: _OfLayers = "gelu"
    dropout: _Dropout = 0.0
    bias: _OfMatrices = True

    @model_validator(mode="after")
    def _parts_fit(self) -> "MlpSpec":
        is_inverted = self.bottleneck == "inverted"
        needs = {
            "expansion": (is_inverted, "model.bottleneck=inverted"),
            "activation_first": (not is_inverted, "model.bottleneck=none"),
            "norm_place": (self.skip <= 1, "model.skip_every=1"),
        }
        check_needs(self, "model", needs)
        if self.depth % max(1, self.skip):
            raise SettingsError(
                "model.skip_every",
                f"{self.skip} does not divide depth {self.depth}",
                f"choose a divisor of {self.depth}",
                code="conflict",
            )
        return self

    @property
    def skip(self) -> int:
        return int(self.bottleneck == "inverted") if self.skip_every is None else self.skip_every

    @property
    def label(self) -> str:
        return (
            f"B-{self.depth}/Wi-{self.width}"
            if self.bottleneck == "inverted"
            else f"MLP-{self.depth}/{self.width}"
        )

    @property
    def hidden_width(self) -> int:
        return max(1, round(self.expansion * self.width))


class MixerSpec(Spec):
    """The Mixer paper's models: per-patch linear, `depth` mixing blocks on (S tokens, C channels),
    norm, mean over tokens, linear."""

    kind: Literal["mixer"]
    patch_size: int = Field(16, ge=1)
    """Side of the square patches, in pixels. Each patch becomes a token."""
    num_channels: int = Field(768, ge=1)
    """Number of entries of each token (C)."""
    depth: int = Field(12, ge=1)
    """Number of blocks (a token mixing and a channel mixing each)."""
    expansion: float = Field(EXPANSION, gt=0)
    """Hidden width of token mixing and channel mixing, as a multiple of their input width (gamma).
    """
    token_hidden: int | None = Field(None, ge=1, examples=[384])
    """Hidden width of the token mixing (default: gamma S)."""
    channel_hidden: int | None = Field(None, ge=1, examples=[3072])
    """Hidden width of the channel mixing (default: gamma C)."""
    layers_per_mixing: Literal[1, 2] = 2
    """Number of layers in a mixing. 2: W2 act(W1 x), the MLP-Mixer. 1: act(W x), the S-Mixer, which
    has no gamma."""
    num_tokens: int | None = Field(None, ge=1, examples=[64])
    """Number of tokens S. Default: S0, one token per patch. If S is set, the skip path of the first
    block is LN(W~ X), even if S = S0. W~ is an S x S0 matrix."""
    permuted_blocks: BlockNumbers = Field((), examples=["all", [0, 3]])
    """Numbers of the blocks (from 0) whose mixings read and write entries in a random order, fixed
    at initialization (RP variants)."""
    activation: _OfLayers = "gelu"
    dropout: _Dropout = 0.0
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of every LayerNorm: 1e-5 in the paper, 1e-6 in timm's Mixers."""
    init: Init = "normal"
    """Initial weights of the mixing layers. normal: N(0, 1/S) for tokens and N(0, 1/C) for
    channels, as in the paper. torch: uniform between -1/sqrt(inputs) and 1/sqrt(inputs)."""
    final_norm: bool = True
    """Use a LayerNorm between the last block and the mean over tokens. Section A.2.1 of the paper
    prints this norm, section 2.2 does not."""
    bias: _OfMatrices = True

    @model_validator(mode="after")
    def _parts_fit(self) -> "MixerSpec":
        wrong = [block for block in self._numbered_blocks if not 0 <= block < self.depth]
        if wrong:
            remedy = f"use numbers from 0 to {self.depth - 1}, or all"
            raise SettingsError(
                "model.permuted_blocks", f"there is no block {wrong[0]}", remedy, code="bad-value"
            )
        hidden = self.layers_per_mixing == 2, "model.layers_per_mixing=2"
        check_needs(self, "model", dict.fromkeys(("token_hidden", "channel_hidden"), hidden))
        is_read = hidden[0] and not (self.token_hidden and self.channel_hidden)
        needed = "model.token_hidden=null" if hidden[0] else hidden[1]
        check_needs(self, "model", {"expansion": (is_read, needed)})
        return self

    @property
    def label(self) -> str:
        blocks = ",".join(map(str, self._numbered_blocks))
        permuted = "RP " if self.permuted_blocks == "all" else f"RP({blocks}) " if blocks else ""
        kind = permuted + ("Mixer" if self.layers_per_mixing == 2 else "S-Mixer")
        tokens = f" S{self.num_tokens}" if self.num_tokens else ""
        return f"{kind} P{self.patch_size}{tokens} C{self.num_channels} L{self.depth}"

    @property
    def _numbered_blocks(self) -> tuple[int, ...]:
        return () if self.permuted_blocks == "all" else self.permuted_blocks

    def is_permuted(self, block: int) -> bool:
        return self.permuted_blocks == "all" or block in self._numbered_blocks

    def check(self, *, image_size: int) -> None:
        check_patch_size(self.patch_size, image_size=image_size)

    def num_patches(self, *, image_size: int) -> int:
        return int((image_size // self.patch_size) ** 2)

    def tokens(self, *, image_size: int) -> int:
        return self.num_tokens or self.num_patches(image_size=image_size)

    def hidden_sizes(self, *, num_tokens: int) -> tuple[int, int]:
        token_hidden = self.token_hidden or max(1, round(self.expansion * num_tokens))
        return token_hidden, self.channel_hidden or max(
            1, round(self.expansion * self.num_channels)
        )


class SparseMlpSpec(Spec):
    """The Mixer paper's SW-MLP: per-patch linear, one vector, `depth` blocks x + act((M * W) LN(x))
    with a fixed random mask M."""

    example_with: ClassVar = {"outer_activation": "{}expansion=2"}
    kind: Literal["sw_mlp"]
    patch_size: int = Field(4, ge=1)
    """Side of the square patches of the first layer, in pixels."""
    num_channels: int = Field(48, ge=1)
    """Number of outputs of the first layer for each patch (C)."""
    width: int | None = Field(None, ge=1, examples=[1024])
    """Number of entries of the hidden vector (m). Default: S0 C, for S0 patches."""
    depth: int = Field(8, ge=1)
    """Number of sparse blocks."""
    density: float = Field(0.5, gt=0, le=1)
    """Probability that a connection exists (p)."""
    expansion: float | None = Field(None, gt=0, examples=[2.0])
    """Hidden width gamma, as a multiple of m, in x + (M2 * W2) act((M1 * W1) LN(x)). Default: no
    hidden layer."""
    outer_activation: bool = False
    """Apply a second activation: x + act((M2 * W2) act((M1 * W1) LN(x))), equation (S.17). Appendix
    C.1 of the paper omits this activation. This needs `expansion`."""
    widen: Literal["dense", "sparse"] = "dense"
    """Type of the layer from S0 patches of C channels to m entries (our choice). sparse: the layer
    has the density of the blocks. dense: the layer may have more connections than a block."""
    final_norm: bool = False
    """Use a LayerNorm between the last block and the classifier. Section A.2.5 of the paper does
    not print this norm."""
    init_gain: Literal["spectral"] | None = None
    """Scale of the initial weights. spectral: the largest singular value of each matrix in a block
    is 1 + sqrt(gamma), as for a dense matrix. null: the largest singular value grows with the width
    at a fixed Omega (number of connections)."""
    storage: Literal["auto", "masked", "sparse"] = "auto"
    """Storage of the matrices. masked: a dense matrix times a mask. sparse: only the connections.
    auto: sparse if density is at most 0.05."""

    @property
    def is_sparse(self) -> bool:
        """True if only connections are stored. Up to density 0.05 sparse storage is faster at all
        widths on a CPU (1.5 to 6 times, benchmarks/sparse.py)."""
        return self.storage == "sparse" or (self.storage == "auto" and self.density <= 0.05)

    activation: _OfLayers = "gelu"
    dropout: _Dropout = 0.0
    bias: _OfMatrices = True

    @model_validator(mode="after")
    def _parts_fit(self) -> "SparseMlpSpec":
        needs = {"outer_activation": (self.expansion is not None, "model.expansion=2")}
        check_needs(self, "model", needs)
        return self

    @property
    def label(self) -> str:
        width = f" m{self.width}" if self.width else ""
        return f"SW-MLP{width} p{self.density:g} L{self.depth}" + (
            " sparse" if self.is_sparse else ""
        )

    def check(self, *, image_size: int) -> None:
        check_patch_size(self.patch_size, image_size=image_size)
        width = self.width_at(image_size=image_size)
        if self.density * width < 1:
            raise SettingsError(
                "model.density",
                f"{self.density:g} gives each of {width} entries less than one connection",
                f"give {1 / width:.2g} or more",
                code="bad-value",
            )

    def hidden_width(self, width: int) -> int:
        return max(1, round((self.expansion or 1) * width))

    def width_at(self, *, image_size: int) -> int:
        """Return the number of entries of the hidden vector (m)."""
        return self.width or int((image_size // self.patch_size) ** 2) * self.num_channels


class StructuredMlpSpec(Spec):
    """The Mixer paper's shallow Monarch and Kronecker MLPs: an image x becomes Bc B2 relu(B1 x),
    with a dense classifier Bc."""

    kind: Literal["structured"]
    form: Literal["monarch", "kronecker"]
    """Structure of B1 and B2. monarch: block-diagonal matrices with permutations between them.
    kronecker: same as monarch, but all blocks of a matrix are equal."""
    num_rows: int = Field(28, ge=1)
    """Number of rows of the hidden vector, viewed as a matrix."""
    num_columns: int = Field(28, ge=1)
    """Number of columns of the hidden vector, viewed as a matrix."""
    activation: _OfLayers = "relu"
    grayscale: bool = True
    """Average the colors of the image. A row then has W entries instead of 3 W (MNIST is gray)."""

    @property
    def label(self) -> str:
        return f"{self.form.capitalize()} {self.num_rows} x {self.num_columns}"


class TimmSpec(Spec):
    """Baselines of *Scaling MLPs* from timm: convolutional networks and a transformer."""

    kind: Literal["timm"]
    name: Literal["resnet152_64", "vit_b_4", "resnet18_32", "resnet18_224"]
    """Name of the network. resnet152_64: ResNet-152 whose stem has stride 1 and no pooling.
    vit_b_4: ViT-B with 4 x 4 patches. resnet18_32: ResNet-18 whose 3 x 3 stem has stride 1 and no
    pooling, as usual for CIFAR. resnet18_224: ResNet-18 for ImageNet."""

    @property
    def label(self) -> str:
        names = {"resnet152_64": "ResNet-152", "vit_b_4": "ViT-B/4"}
        return names.get(self.name, "ResNet-18")

    def check(self, *, image_size: int) -> None:
        if self.name == "vit_b_4":
            check_patch_size(4, image_size=image_size)
        elif self.name == "resnet152_64" and image_size < 7:
            raise SettingsError(
                "data.image_size",
                f"{image_size} is too small for the stem of a ResNet",
                "use 7 or more",
                code="bad-value",
            )


class TimmModelSpec(Spec):
    """Any model of timm. `pretrained: timm:NAME` writes this spec."""

    kind: Literal["timm_model"]
    name: str = Field(pattern=r"^\w+$", examples=["resnet50"])
    """Name of the model in timm, without the tag of its weights."""
    arguments: str = Field("{}", examples=['{"img_size": 224}'])
    """Arguments of timm.create_model, as JSON. Arguments that load weights, for example pretrained,
    are rejected, because a downloaded config could use them."""
    num_features: int = Field(ge=1, examples=[2048])
    """Number of inputs of the classifier."""

    @field_validator("arguments")
    @classmethod
    def _builds_and_reads_nothing(cls, arguments: str) -> str:
        read = [
            name
            for name in dict(json.loads(arguments))
            if name.startswith(("pretrained", "checkpoint", "cache"))
        ]
        if read:
            raise ValueError(f"{', '.join(read)} would make timm read weights; remove the argument")
        return arguments

    @property
    def label(self) -> str:
        return self.name


OWN_CLASS = r"^\w[\w.]*:\w+$"


class ImportSpec(Spec):
    """A torch module of your own, selected by `model: {import: module:Class}`."""

    kind: Literal["import"]
    path: str = Field(examples=["my_package.my_module:MyModel"], pattern=OWN_CLASS)
    """Module and class, written as module:Class."""
    arguments: str = Field("{}", examples=['{"width": 64}'])
    """Arguments of the class as JSON, in addition to num_classes and img_size."""

    @property
    def label(self) -> str:
        return self.path.partition(":")[2]


def check_patch_size(patch_size: int, *, image_size: int) -> None:
    if image_size % patch_size:
        near = nearest_divisor(image_size, patch_size)
        raise SettingsError(
            "model.patch_size",
            f"{patch_size} does not divide image size {image_size}",
            f"set {near}, the nearest divisor",
            code="conflict",
        )


def nearest_divisor(whole: int, wanted: int) -> int:
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - wanted))


AnySpec = (
    MlpSpec | MixerSpec | SparseMlpSpec | StructuredMlpSpec | TimmSpec | TimmModelSpec | ImportSpec
)
ModelSpec = Annotated[AnySpec, Field(discriminator="kind")]
