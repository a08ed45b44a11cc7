"""Weights on a hub of `tests.hub`: our own pushed and loaded, timm's, and errors of a hub."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub import constants, file_download
from timm.models import save_for_hf

from data_prep.manifest import load_manifest
from finetune.cli import main
from finetune.tune.config import TuneSettings
from finetune.tune.tune import Tuning
from pretrain.checkpoints.card import CheckpointError, read_card
from pretrain.checkpoints.checkpoint import Checkpoint, check_source
from pretrain.checkpoints.files import load_model, save_folder
from pretrain.checkpoints.hub import fetch
from pretrain.checkpoints.run import begun_with
from pretrain.data.datasets import load_training_data
from pretrain.models.build import pooled_features
from pretrain.models.cost import num_features_of
from pretrain.models.spec import MixerSpec, TimmModelSpec
from pretrain.models.timm_baselines import TimmModel
from pretrain.optim import parameter_groups
from pretrain.record import RecordSettings, write_record
from tests.errors import fails, printed_errors
from tests.finetune.tiny import judge, plain_logits
from tests.hub import TOKEN, Hub, serving

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # a warning of httpx2 in huggingface_hub's uploads
FILES = ("model.safetensors", "config.json", "sha256.json")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub for huggingface_hub in this process, which has already read its variables."""
    with serving() as found:
        for name, value in {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
                constants.ENDPOINT, found.url
            ),
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield found


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files to publish, without record.json, which has paths of this machine."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.name != "record.json"]
    return {path.name: path.read_bytes() for path in paths}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Return (field, code) of a command that fails with one line, which names no token."""
    assert main([*words]) != 0
    text = capsys.readouterr().err.strip()
    assert "\n" not in text and os.environ.get("HF_TOKEN", TOKEN) not in text
    (error,) = printed_errors(text)
    return error


@pytest.mark.usefixtures("without_pictures")
def test_what_is_pushed_is_taken_again(
    hub: Hub, folder: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(folder), "out", "--formats", "timm", "--push-to", "user/mine"]
    assert main(words) == 0
    repository = hub.repositories["user/mine"]
    (first,) = repository.branches["main"]
    assert repository.private
    assert repository.files[first] == files_of(tmp_path / "out")
    assert "hf-hub:user/mine" in repository.files[first]["README.md"].decode()
    assert f"hf-hub:user/mine@{first}: pushed as one commit" in capsys.readouterr().out

    there, here = Checkpoint.open("hf-hub:user/mine"), Checkpoint.open(folder)
    assert (there.origin, there.sha256) == (f"hf-hub:user/mine@{first}", here.sha256)
    assert there.card == here.card.model_copy(update={"origin": there.origin})
    result = judge(Path("hf-hub:user/mine"), shapes, None)
    assert (result["pretrained"], result["weights_from"]) == (there.origin, there.origin)
    assert Path(result["run_dir"]).parent == tmp_path / "runs/user--mine-evaluations"
    logits, labels = plain_logits(folder, shapes)
    assert result["eval/top1"] == pytest.approx(float((logits.argmax(1).numpy() == labels).mean()))

    hub.put(
        "user/mine",
        files_of(tmp_path / "out") | {"model.onnx": b"of an export before", "theirs.txt": b"kept"},
    )
    assert main(["export", str(folder), "again", *words[3:], "license=mit"]) == 0
    newest = repository.files[repository.branches["main"][-1]]
    assert len(repository.branches["main"]) == 3
    assert newest == files_of(tmp_path / "again") | {"theirs.txt": b"kept"}

    (tmp_path / "out/notes.txt").write_text("of the user alone")
    assert main([*words, "--revision", "v2"]) == 0
    assert "notes.txt" not in repository.files[repository.branches["v2"][-1]]
    assert len(repository.branches["main"]) == 3
    assert (
        repository.files[repository.branches["v2"][-1]]["README.md"]
        == (tmp_path / "out/README.md").read_bytes()
    )
    assert fetch("hf-hub:user/mine@v2", files=FILES)[1].endswith(repository.branches["v2"][-1])
    assert Checkpoint.open(f"hf-hub:user/mine@{first}").origin.endswith(first)


def test_an_export_is_private_unless_asked(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(folder), "out", "--formats", "timm", "--push-to", "user/open"]
    hub.put("user/open", {"README.md": b"for all"})
    assert said(capsys, *words) == ("push_to", "conflict")
    assert not Path("out").exists(), "it is asked before the work"
    assert main([*words, "private=false"]) == 0
    assert len(hub.repositories["user/open"].branches["main"]) == 2


def test_a_branch_that_moves_on_is_other_weights(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's record has the commit of its weights. Offline, the cache is used."""
    hub.put("user/mine", files_of(folder))
    begun = Checkpoint.open("hf-hub:user/mine")
    write_record(tmp_path, "probe", RecordSettings(), seed=0, weights=begun)
    assert begun_with(tmp_path)["weights_from"] == begun.origin
    check_source(tmp_path, "hf-hub:user/mine")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert Checkpoint.open("hf-hub:user/mine") == begun
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert len(hub.asked) == asked

    card = read_card(folder)
    save_folder(
        tmp_path / "other",
        card=card,
        weights={n: t + 1 for n, t in load_model(begun).state_dict().items()},
    )
    hub.put("user/mine", files_of(tmp_path / "other"))
    with fails("changed", "pretrained"):
        check_source(tmp_path, "hf-hub:user/mine")
    check_source(tmp_path, begun.origin)


def test_each_refusal_is_one_line(
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.put("user/gated", files_of(folder), gated=True)
    hub.put("user/private", files_of(folder), private=True)
    hub.put("user/pickle", {"pytorch_model.bin": b"\x80", "config.json": b"{}"})
    hub.put("user/damaged", files_of(folder) | {"model.safetensors": b"0" * 30_000})

    def code(name: str) -> str:
        field, found = said(capsys, "predict", name, str(tmp_path), "--out", "p.csv")
        assert field.startswith(name.partition("@")[0]) or found == "damaged"
        return found

    assert code("hf-hub:user/gated") == "no-access"
    assert code("hf-hub:user/missing") == "missing-path"
    assert code("hf-hub:user/gated@v9") == "missing-path"
    assert code("hf-hub:user/pickle") == "unknown-format"
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.bin")), "a pickle was fetched"
    assert code("hf-hub:user/damaged") == "damaged"
    assert code("hf-hub:a/b/c") == "bad-value"
    assert code("timm:resnet50x") == "unknown-name"

    push = ["export", str(folder), "out", "--push-to", "user/mine"]
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert code("hf-hub:user/private") == "no-access"
    assert said(capsys, *push) == ("push_to", "no-access")
    monkeypatch.delenv("HF_TOKEN")
    assert said(capsys, *push) == ("push_to", "no-access")
    assert code("hf-hub:user/private") == "missing-path"

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert code("hf-hub:user/private") == "unreachable"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert code("hf-hub:user/private") == "unreachable"


def test_a_transfer_that_is_cut_goes_on(
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        file_download,
        "time",
        SimpleNamespace(sleep=lambda seconds: None, time=file_download.time.time),
    )
    hub.put("user/mine", files_of(folder))
    hub.cut_after, hub.num_cuts = 0, 100
    words = ["predict", "hf-hub:user/mine", str(tmp_path), "--out", "p.csv"]
    assert said(capsys, *words) == ("hf-hub:user/mine", "unreachable")
    hub.cut_after, hub.num_cuts = 30_000, 2
    assert Checkpoint.open("hf-hub:user/mine").sha256 == Checkpoint.open(folder).sha256
    assert hub.num_cuts == 0


TIMMS = {
    "test_vit.r160_in1k": {"img_size": 32},
    "test_resnet.r160_in1k": {},
    "test_convnext.r160_in1k": {},
    "mobilenetv3_small_050.lamb_in1k": {},
    "mixer_s32_224.untagged": {"img_size": 32, "mlp_ratio": (0.1, 0.25)},
}
"""Models of timm and their sizes: a transformer, batch norm, a deeper classifier, a head with a
hidden layer. This project has the last model, too."""


def timms(hub: Hub, name: str, classes: tuple[str, ...]) -> torch.nn.Module:
    """Put a model with random weights on the hub by timm's own saver. Return the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = timm.create_model(name.partition(".")[0], num_classes=len(classes), **TIMMS[name])
        for tensor in model.state_dict().values():  # changed statistics, and a nonzero classifier
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.rand_like(tensor))
    size = {"input_size": (3, 32, 32), "label_names": classes, "interpolation": "bicubic"}
    place = Path("saved") / name
    save_for_hf(
        model,
        place,
        model_config={"pretrained_cfg": size, "label_names": list(classes)},
        safe_serialization=True,
    )
    hub.put(f"timm/{name}", files_of(place))
    return model.eval()


@pytest.mark.parametrize("name", TIMMS)
def test_a_model_of_timm_answers_as_there(
    hub: Hub, name: str, shapes: Path, tmp_path: Path
) -> None:
    classes = load_manifest(shapes).classes
    theirs = timms(hub, name, classes)
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    checkpoint = Checkpoint.open(f"timm:{name}")
    card = checkpoint.card
    assert (card.classes, card.image_size, card.fed_interpolation) == (classes, 32, "bicubic")
    assert isinstance(card.model, MixerSpec if name.startswith("mixer") else TimmModelSpec)
    assert card.origin == f"hf-hub:timm/{name}@{checkpoint.directory.name}"

    ours = load_model(checkpoint).eval()
    with torch.no_grad():
        features = theirs.forward_head(theirs.forward_features(x), pre_logits=True)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pooled_features(ours, x), features, rtol=1e-4, atol=1e-5)
    assert num_features_of(card.model, image_size=32) == features.shape[1]
    save_folder(
        tmp_path / "again", card=card, weights=ours.state_dict()
    )  # like a probe or fine-tuning
    again = load_model(Checkpoint.open(tmp_path / "again")).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), ours(x), rtol=0, atol=0)


def test_timm_says_where_the_layers_are(
    hub: Hub, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rates fall by layer from the head on. tune names a model that timm does not split
    into layers."""
    timms(hub, "test_resnet.r160_in1k", load_manifest(shapes).classes)
    words = {
        "run_dir": "runs/tuned",
        "pretrained": "timm:test_resnet.r160_in1k",
        "data": {"dataset": str(shapes)},
    }
    tree = words | {
        "train": {"duration": "1 epochs", "global_batch_size": 8},
        "optimizer": {"layer_decay": 0.5, "lr": 1e-3},
    }
    settings = TuneSettings.model_validate(tree, strict=False)
    checkpoint = Checkpoint.open(settings.pretrained)
    tuning = Tuning(
        settings, load_training_data(settings.as_training(checkpoint.card).data), checkpoint
    )
    model = tuning.model()
    names = {id(weight): name for name, weight in model.named_parameters()}
    rates = {
        names[id(w)]: group["lr_scale"]
        for group in parameter_groups(model, settings.optimizer)
        for w in group["params"]
    }
    assert [
        rates[f"body.{name}"]
        for name in ("conv1.0.weight", "layer1.0.conv1.weight", "layer4.0.conv1.weight")
    ] == [1 / 16, 1 / 8, 1]
    assert rates["head.weight"] == settings.optimizer.head_lr_scale

    monkeypatch.delattr(type(model.body), "group_matcher")
    with fails("unsupported", "pretrained"):
        tuning.model()


def test_a_folder_of_timm_that_cannot_be_read_is_an_error(hub: Hub, shapes: Path) -> None:
    """Other inputs and classifiers, damaged files, and configs that would make timm load other
    weights, perhaps a pickle."""
    timms(hub, "test_vit.r160_in1k", load_manifest(shapes).classes)
    place = Path("saved/test_vit.r160_in1k")
    config, weights = place / "config.json", place / "model.safetensors"
    tree, ours = json.loads(config.read_text()), read_card(place).model_dump(mode="json")
    classifiers, known = ["head", "head_dist"], tree["pretrained_cfg"]
    changes = {"input_size": [1, 28, 28]}, {"classifier": classifiers}, {"mean": "red"}
    cfgs = [*(known | change for change in changes), None, []]
    trees = [tree | {"pretrained_cfg": cfg} for cfg in cfgs]
    other = {"checkpoint_path": "x.bin"}, {"pretrained": True}, {"pretrained_cfg": {"url": "x"}}
    for arguments in other:
        model = ours["model"] | {"arguments": json.dumps(arguments)}
        trees += [tree | {"model_args": arguments}, ours | {"model": model}]
    trees.append(ours | {"model": ours["model"] | {"name": "hf-hub:user/other"}})
    for each in trees:
        config.write_text(json.dumps(each))
        with pytest.raises(CheckpointError):
            Checkpoint.open(place)
    config.write_text(json.dumps(tree))
    Checkpoint.open(place)
    for head in (b"<html><body>", b"\xff" * 9, b"\x02" + bytes(7) + b"[]"):
        weights.write_bytes(head)
        with pytest.raises(CheckpointError):
            Checkpoint.open(place)


def test_a_classifier_of_imagenet_has_wordnets_names(hub: Hub, shapes: Path) -> None:
    timms(hub, "test_vit.r160_in1k", load_manifest(shapes).classes)
    place = Path("saved/test_vit.r160_in1k")
    tree = json.loads((place / "config.json").read_text())
    for each in (tree, tree["pretrained_cfg"]):
        each.pop("label_names", None)
    for count, names in (
        (1000, timm.data.ImageNetInfo().label_names()),
        (3, ["class_00000", "class_00001", "class_00002"]),
    ):
        (place / "config.json").write_text(json.dumps(tree | {"num_classes": count}))
        assert read_card(place).classes == tuple(names)


def test_a_model_that_would_answer_otherwise_is_refused(
    hub: Hub, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timms(hub, "test_vit.r160_in1k", load_manifest(shapes).classes)
    pool = TimmModel.pool
    monkeypatch.setattr(TimmModel, "pool", lambda model, x: 2 * pool(model, x))
    with fails("unsupported"):
        load_model(Checkpoint.open("timm:test_vit.r160_in1k"))
