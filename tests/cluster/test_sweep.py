"""Sweeps: which members a file has, which of them are left, what each runs, and that one that fails does not stop the others."""

import itertools
import random
from pathlib import Path

import pytest

from cluster.studies.local import Here
from cluster.studies.sweep_file import compressed, load_sweep, problems_of
from cluster.submission import main as submission
from cluster.sweep import main
from data_prep.settings import SettingsError
from pretrain.config import PretrainSettings
from pretrain.models.spec import MixerSpec, MlpSpec
from tests.cluster.finished import finish
from tests.ranks import REPOSITORY

SHIPPED = sorted(path.name for path in (REPOSITORY / "configs/sweep").glob("*.yaml"))
SMALL = """
command: pretrain
config: configs/pretrain/demo_mlp.yaml
overrides: [train.duration=2 epochs]
grid:
  shape:
    narrow: {model.width: 64, model.depth: 8}
    wide: {model.width: 256, model.depth: 2}
  optimizer.lr: [1e-4, 0.001]
seeds: [7, 8]
run_dir: runs/{name}/{shape}-lr-{optimizer.lr}-{seed}
max_concurrent: 3
"""


def written(text: str, name: str = "small.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_members_are_the_product_in_the_order_of_the_file(checkout: Path) -> None:
    first, second = load_sweep(written(SMALL)), load_sweep(written(SMALL))
    common = ["configs/pretrain/demo_mlp.yaml", "train.duration=2 epochs"]
    found = [member.work.words[2:] for member in first.members]
    assert found[0] == [
        *common, "model.width=64", "model.depth=8", "optimizer.lr=0.0001", "train.seed=7", "run_dir=runs/small/narrow-lr-0.0001-7",
    ]  # fmt: skip
    assert found[6] == [
        *common, "model.width=256", "model.depth=2", "optimizer.lr=0.001", "train.seed=7", "run_dir=runs/small/wide-lr-0.001-7",
    ]  # fmt: skip
    assert len(found) == 8 and found == [member.work.words[2:] for member in second.members]
    settings = first.members[7].work.settings
    assert isinstance(settings, PretrainSettings) and isinstance(settings.model, MlpSpec)
    assert (settings.model.width, settings.model.depth, settings.optimizer.lr, settings.train.seed) == (
        256,
        2,
        0.001,
        8,
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_sweep_passes_its_check(checkout: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"configs/sweep/{name}"
    lines = Path(path).read_text().splitlines()
    assert len(lines) <= 40
    for word in ("command", "hardware", "result"):
        assert sum(line.startswith(f"# {word} ") for line in lines) == 1, word
    assert main(["check", path]) == 0
    members = load_sweep(path).members
    assert len({member.run_dir for member in members}) == len(members) > 1
    assert f"{len(members)} members" in capsys.readouterr().out


def test_the_sweep_over_c_and_s_keeps_omega_and_turns_to_its_mirror(checkout: Path) -> None:
    shapes = set()
    for member in load_sweep("configs/sweep/wide_smixer.yaml").members:
        settings = member.work.settings
        assert isinstance(settings, PretrainSettings) and isinstance(settings.model, MixerSpec)
        channels, tokens = settings.model.num_channels, settings.model.num_tokens or 0
        omega = 2 ** int(Path(member.run_dir).name[len("omega") :].split("-")[0])
        assert abs((channels * tokens**2 + channels**2 * tokens) / 2 / omega - 1) < 0.02, member.run_dir
        assert (settings.model.permuted_blocks == "all") == ("-rp-" in member.run_dir)
        shapes.add((channels, tokens))
    assert {(16, 173), (32, 113), (48, 83), (16, 504), (32, 346), (64, 226)} < shapes
    assert shapes == {(tokens, channels) for channels, tokens in shapes}


def test_each_pretrained_member_is_probed_on_each_dataset(checkout: Path) -> None:
    pretrained = [member.run_dir for member in load_sweep("configs/sweep/scaling_law.yaml").members]
    probes = load_sweep("configs/sweep/scaling_law_probe.yaml").members
    assert [probe.work.pretrained for probe in probes] == [run for run in pretrained for _ in range(2)]
    assert {probe.work.datasets for probe in probes} == {("data/cifar10",), ("data/cifar100",)}


def test_array_ranges_parse_back_to_the_set() -> None:
    draw = random.Random(0)
    sets = [sorted(draw.sample(range(40), draw.randint(1, 40))) for _ in range(200)]
    for chosen in sets:
        text = compressed(chosen)
        spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
        assert [index for span in spans for index in range(span[0], span[-1] + 1)] == chosen
        assert all(later[0] - earlier[-1] > 1 for earlier, later in itertools.pairwise(spans)), text
    assert compressed([2, 5, 6, 7]) == "2,5-7"


def test_submissions_and_lists_leave_out_what_is_finished(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(SMALL)
    members = load_sweep(path).members
    for index in (0, 3, 4):
        finish(members[index].work)
    assert submission(["--begin=tomorrow", "cluster/sweep.slurm", path]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "array\t1-2,5-7%3" in said and "reads\tconfigs/pretrain/demo_mlp.yaml" in said
    assert [line.split("\t")[1] for line in said if line.startswith("writes")] == ["1", "2", "5", "6", "7"]
    assert main(["array", path]) == 0
    assert capsys.readouterr().out == "0-7%3\n"
    assert main(["list", path]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines()[1:9]]
    assert [int(row[0]) for row in rows if row[1] == "finished"] == [0, 3, 4]
    assert "3 of 8 finished" in table and "cluster/submit cluster/sweep.slurm small.yaml" in table
    assert [member.work.words for member in load_sweep(path).members] == [member.work.words for member in members]
    for member in members:
        finish(member.work)
    assert submission(["cluster/sweep.slurm", path]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "all 8 members are finished" in said.err


def test_member_prints_its_command_and_refuses_other_numbers(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(SMALL)
    assert main(["member", path, "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["pretrain", "train", "configs/pretrain/demo_mlp.yaml", "train.duration=2 epochs"]
    assert lines[-1] == "run_dir=runs/small/narrow-lr-0.0001-8"
    for wrong in ("8", "-1", "x", ""):
        assert main(["member", path, "--", wrong]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and "its members are 0 to 7" in said.err


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("{shape}-lr", "{shap}-lr", "run_dir: there is no axis 'shap'; did you mean 'shape'?"),
        ("-{seed}", "", "member 1: writes runs/small/narrow-lr-0.0001, as member 0 does"),
        ("0.001]", "-1]", "member 2: configs/pretrain/demo_mlp.yaml: optimizer.lr: -1"),
        ("model.depth: 2", "model.depht: 2", "model.depht: unknown key; did you mean 'depth'?"),
        ("0.001]", "1e-4]", "two of its values are called '0.0001'"),
        ("[1e-4, 0.001]", "3", "grid.optimizer.lr: 3 will not do; give a list of values, or cases"),
        ("[7, 8]", "[" + ",".join(map(str, range(251))) + "]", "1,004 members are more than an array of SLURM takes"),
        ("shape:\n", "seed:\n", "grid.seed: the name is taken"),
        ("demo_mlp.yaml", "demo_mpl.yaml", "no such config file; did you mean configs/pretrain/demo_mlp.yaml?"),
        (
            "command: pretrain",
            "command: pretrain\npretrained_by: a.yaml",
            "pretrained_by: 'a.yaml' is for probe and tune",
        ),
    ],
)
def test_mistakes_are_named(
    checkout: Path, old: str, new: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in SMALL
    path = written(SMALL.replace(old, new))
    assert main(["check", path]) == main(["array", path]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.startswith("cluster.sweep: small.yaml") and said.out == ""


def test_a_member_that_its_dataset_refuses_is_named(checkout: Path, shapes: Path) -> None:
    text = SMALL.replace("[train.duration=2 epochs]", f"[train.duration=9 steps, data.dataset={shapes}]")
    problems = problems_of(load_sweep(written(text)))
    assert len(problems) == 8 and "schedule.warmup: '10 steps' is 10 steps, but the run has 9" in problems[0]


def test_a_place_with_another_run_in_it_is_no_finished_member(checkout: Path) -> None:
    sweep = load_sweep(written(SMALL))
    finish(sweep.members[0].work)
    other = load_sweep(written(SMALL.replace("2 epochs", "3 epochs")))
    with pytest.raises(SettingsError, match="belongs to a run with other settings"):
        other.members[0].work.is_finished()
    assert other.members[0].work.state() == "other settings" and other.members[1].work.state() == "not begun"


def test_run_does_the_rest_after_a_failure(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(SMALL)
    members = load_sweep(path).members
    finish(members[2].work)
    asked: list[list[str]] = []

    def run(here: Here, words: list[str]) -> int:
        asked.append(words)
        index = next(member.index for member in members if words[: len(member.work.words)] == member.work.words)
        if index == 1 and len(asked) < 8:
            return 9
        finish(members[index].work)
        return 0

    monkeypatch.setattr(Here, "run", run)
    assert main(["run", path, "--ranks", "2"]) == 1
    assert asked == [[*members[index].work.words, "--ranks", "2"] for index in (0, 1, 3, 4, 5, 6, 7)]
    summary = capsys.readouterr().out
    assert "failed with exit code 9" in summary and "1 of 8 failed" in summary and summary.count("finished before") == 1
    assert main(["run", path, "--ranks", "2"]) == 0
    assert asked[7:] == [[*members[1].work.words, "--ranks", "2"]]
