"""A stream gives stock webdataset's samples of the same list, with images and labels. Each rank
reads its own shards, and all ranks take the same number of steps. Interrupted reads are retried;
unusable samples are counted."""

import gzip
import itertools
import json
import signal
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from psutil import Process
from webdataset.shardlists import expand_urls

from data_prep import remote
from data_prep.manifest import Shard
from data_prep.settings import read_yaml, validate
from pretrain.checkpoints.card import read_card
from pretrain.checkpoints.run import list_checkpoints
from pretrain.cli import main
from pretrain.config import DataSettings
from pretrain.data.bad_samples import BadSampleLog
from pretrain.data.datasets import StreamData, expand_shards, load_training_data
from pretrain.data.loader import Batch, as_stored
from pretrain.data.order import BatchPlan
from pretrain.data.stream import Stream, batches_of
from pretrain.ranks.world import World
from pretrain.tracking.run_tags import shown_command
from tests.data_prep.samples import encoded, files_of, picture
from tests.data_prep.stock import web, write_stock
from tests.errors import fails, printed_errors
from tests.moments import wait_until
from tests.training import finish, start

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # stock webdataset does not close its files
SIZE, CLASSES = 16, 5


def member(number: int, kind: str = "PNG") -> bytes:
    return encoded(picture(seed=number, width=SIZE, height=SIZE), kind)


def shard(path: Path, numbers: range, *, label: str = "cls", ending: str = "png") -> Path:
    """Write a shard by webdataset's writer; the label is `number % CLASSES`."""
    samples = []
    for number in numbers:
        value = (
            number % CLASSES
            if label == "cls"
            else {"meta": {"label": number % CLASSES, "of": "us"}}
        )
        samples.append(
            {"__key__": f"some/folder/{number:05d}", ending: member(number), label: value}
        )
    return write_stock(path, samples)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve shards of seven samples each, and one of them also as tar.gz."""
    folder = tmp_path_factory.mktemp("stream")
    for number in range(12):
        shard(folder / f"part-{number:02d}.tar", range(7 * number, 7 * number + 7))
    (folder / "part-00.tar.gz").write_bytes(gzip.compress((folder / "part-00.tar").read_bytes()))
    return folder


def loaded(urls: str, **more: Any) -> StreamData:
    tree = {
        "dataset": urls,
        "stream": True,
        "num_classes": CLASSES,
        "samples_per_epoch": 84,
        "image_size": SIZE,
        "eval_split": None,
    }
    data = load_training_data(validate(DataSettings, tree | more))
    assert isinstance(data, StreamData)
    return data


@contextmanager
def reading(
    urls: str,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    batch: int = 7,
    consumed: int = 0,
    log: Path | None = None,
    **more: Any,
) -> Iterator[tuple[Stream, Iterator[Batch]]]:
    """Open a rank's stream and its batches."""
    data, world = loaded(urls, **more), World(rank, rank, num_ranks)
    stream = Stream(data, seed=3, world=world)
    plan = BatchPlan(batch * num_ranks, batch, num_ranks)
    how: dict[str, Any] = {
        "rank": rank,
        "consumed": consumed,
        "num_threads": 2,
        "prefetch": 2,
        "pin": False,
        "finish": as_stored,
        "log": log,
    }
    batches = batches_of(stream, data.order(seed=3, global_batch_size=batch), plan, **how)
    try:
        yield stream, iter(lambda: next(batches), None)
    finally:
        batches.close()


def seen(batches: list[Batch]) -> list[tuple[int, bytes]]:
    """Return (label, pixels) of every sample."""
    return [
        (label, image.numpy().tobytes())
        for each in batches
        for label, image in zip(each.labels_B.tolist(), each.images_BHWC, strict=True)
    ]


def stock(urls: str | list[str], *, label: str = "cls", **how: Any) -> list[tuple[int, bytes]]:
    """Return the samples that webdataset reads and decodes."""
    found = list(webdataset.WebDataset(urls, shardshuffle=False, **how).decode("pil"))
    assert found
    pictures = [
        next(value for value in sample.values() if isinstance(value, Image.Image))
        for sample in found
    ]
    labels = [
        sample["cls"] if label == "cls" else sample["json"]["meta"]["label"] for sample in found
    ]
    return [(label, image.tobytes()) for label, image in zip(labels, pictures, strict=True)]


def test_a_list_of_shards_is_expanded_as_webdataset_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WDS_ROOT", "pipe:cat /${INNER}")
    monkeypatch.setenv("WDS_INNER", "x")
    for words in (
        "http://a/b-{000..012}.tar", "s3://b/{x,y}-{0..1}.tar::pipe:cat '/c/{0..2}.tar' | gunzip", "${ROOT}/{a,b}.tar::hf://d/e.tar",
        "pipe:awk '{print}' $HOME/a.tar",
    ):  # fmt: skip
        assert list(expand_shards(words)) == expand_urls(words)


@pytest.mark.parametrize(
    ("form", "label"),
    [
        ("{}/part-{{00..11}}.tar", "cls"),
        ("{0}/part-00.tar.gz::{0}/part-{{01..03}}.tar::file:{0}/part-04.tar", "cls"),
        ("pipe:cat {0}/part-{{05..06}}.tar::pipe:gunzip -c < {0}/part-00.tar.gz", "cls"),
        ("{}/nested.tar", "json:meta.label"),
    ],
    ids=["braces", "gzip and lists", "commands", "labels in JSON, double endings"],
)
def test_a_stream_without_shuffle_is_what_stock_webdataset_reads_in_its_order(
    shards: Path, form: str, label: str
) -> None:
    shard(shards / "nested.tar", range(14), label="json", ending="left.png")
    urls = form.format(shards)
    expected = stock(urls, label=label)
    assert len(expected) % 7 == 0
    with reading(urls, shuffle="none", label=label) as (stream, batches):
        found = seen(list(itertools.islice(batches, len(expected) // 7)))
        assert found == expected
        again = list(itertools.islice(batches, len(expected) // 7))  # the shards start again
        assert seen(again) == expected and all(each.num_bad == 0 for each in again)
        assert stream.names(np.array([0]))[0][1].startswith("some/folder/0")


def test_ranks_read_shards_of_their_own_as_stock_webdataset_splits_them(shards: Path) -> None:
    urls = f"{shards}/part-{{00..11}}.tar"
    listed = expand_urls(urls)
    for rank in range(3):
        with reading(urls, rank=rank, num_ranks=3, shuffle="none") as (_, batches):
            assert seen(list(itertools.islice(batches, 4))) == stock(listed[rank::3])


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_pass_has_every_shard_once_over_all_ranks_and_another_start_another_order(
    shards: Path, num_ranks: int
) -> None:
    data = loaded(f"{shards}/part-{{00..11}}.tar")
    orders = []
    for consumed in (0, 0, 84):
        streams = [
            Stream(data, seed=1, world=World(rank, rank, num_ranks)) for rank in range(num_ranks)
        ]
        num_open = 12 // num_ranks if num_ranks > 3 else 4
        passes: list[list[str]] = [[], []]
        for stream in streams:
            for lane in range(num_open):
                of_lane = stream.shards(lane, num_open, consumed=consumed)
                count = len(range(stream._world.rank + num_ranks * lane, 12, num_ranks * num_open))
                for each in passes:
                    each.extend(itertools.islice(of_lane, count))
        assert all(sorted(each) == sorted(data.urls) for each in passes) and passes[0] != passes[1]
        orders.append(passes)
    assert orders[0] == orders[1] != orders[2]


def test_a_shuffled_stream_has_every_sample_is_the_same_again_and_another_from_another_position(
    shards: Path,
) -> None:
    urls = f"{shards}/part-{{00..11}}.tar"
    expected, orders = stock(urls), []
    for consumed in (0, 0, 42):
        with reading(urls, consumed=consumed, shuffle_buffer=20) as (_, batches):
            orders.append(seen(list(itertools.islice(batches, 24))))  # two epochs
    assert orders[0] == orders[1] != orders[2]
    counts = Counter(orders[0])
    assert (
        set(counts) <= set(expected) and len(counts) > 75 and max(counts.values()) <= 3
    )  # a reader may be an epoch ahead
    assert orders[0][:84] != expected


def test_a_command_that_breaks_is_begun_again_behind_what_it_has_given(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    script, good = tmp_path / "serve", shards / "part-07.tar"
    script.write_text(
        f"echo x >> {tmp_path}/calls\ncase $(wc -l < {tmp_path}/calls) in 1) head -c 9000 {good};;"
        f" 2) cat {good}; exit 3;; *) cat {good};; esac\n"
    )
    with reading(f"pipe:sh {script} --key=secret", shuffle="none") as (_, batches):
        assert seen([next(batches)]) == stock(str(good))
    assert "secret" not in "".join(capsys.readouterr())
    script.write_text("exit 7")
    with (
        reading(f"pipe:sh {script} --key=secret", shuffle="none") as (_, batches),
        pytest.raises(remote.RemoteError, match=r"^pipe:sh .*exit code 7") as failed,
    ):
        next(batches)
    assert "secret" not in str(failed.value)


def test_a_silent_command_does_not_hold_up_the_end(shards: Path) -> None:
    with reading("pipe:sleep 1000 | cat", shuffle="none") as (stream, _):
        while not (
            stream._commands and len(Process(next(iter(stream._commands)).proc.pid).children()) == 2
        ):
            pass
        (command,) = stream._commands
        members = Process(command.proc.pid).children()
    assert command.proc.wait() == -signal.SIGKILL
    wait_until(
        lambda: not [each for each in members if each.is_running() and each.status() != "zombie"]
    )


@pytest.mark.parametrize("cut", [None, 0, 100], ids=["damaged", "between members", "in a header"])
def test_no_sample_behind_a_damaged_header_is_lost_unseen(
    shards: Path, tmp_path: Path, cut: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    data, bad = bytearray((shards / "part-01.tar").read_bytes()), tmp_path / "bad.tar"
    with tarfile.open(shards / "part-01.tar") as tar:
        start = tar.getmembers()[6].offset
    data[start] ^= 255
    bad.write_bytes(data if cut is None else data[: start + cut])
    assert len(stock(str(bad))) == 3  # webdataset does not report the other four
    with (
        reading(str(bad), shuffle="none") as (_, batches),
        pytest.raises(remote.RemoteError, match=f"byte {start:,}"),
    ):
        next(batches)


def test_a_web_server_is_asked_with_the_options_of_storage(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with web(shards) as (address, server):
        urls, storage = f"{address}/part-{{02..03}}.tar", {"params": {"token": "hush"}}
        server.key, server.faults = "token=hush", {"part-02.tar": ["cut"]}
        with reading(urls, shuffle="none", storage=storage) as (_, batches):
            assert seen(list(itertools.islice(batches, 2))) == stock(
                [f"{shards}/part-02.tar", f"{shards}/part-03.tar"]
            )


def test_what_cannot_be_used_is_noted_counted_and_replaced(tmp_path: Path) -> None:
    good = [
        {"__key__": f"{number}", "png": member(number), "cls": number % CLASSES}
        for number in range(4)
    ]
    bad = [
        {"__key__": "cut", "jpg": member(9, "JPEG")[:-40], "cls": 1},
        {"__key__": "unlabeled", "png": member(9), "json": {"species": 3}},
        {"__key__": "beyond", "png": member(9), "cls": CLASSES},
        {"__key__": "two", "png": member(9), "jpg": member(9, "JPEG"), "cls": 1},
        {"__key__": "none", "cls": 1},
    ]
    mixed = [each for pair in itertools.zip_longest(good, bad) for each in pair if each]
    path, log = write_stock(tmp_path / "mixed.tar", mixed), tmp_path / "bad.jsonl"
    with reading(str(path), shuffle="none", batch=8, log=log) as (_, batches):  # two epochs
        first, second = next(batches), next(batches)
    assert (first.num_bad, second.num_bad) == (8, 10)  # good and bad samples alternate
    lines = [
        json.loads(line) for line in log.read_text().splitlines()
    ]  # once for each, in any order of threads
    assert {line["key"]: line["reason"].partition(":")[0] for line in lines} == {
        "cut": "truncated", "unlabeled": "no_label", "beyond": "bad_label", "two": "several_images", "none": "no_image",
    }  # fmt: skip
    assert "set data.label=json:FIELD" in log.read_text() and ".json has species" in log.read_text()
    good_samples = [
        (n % CLASSES, picture(seed=n, width=SIZE, height=SIZE).tobytes()) for n in range(4)
    ]
    assert seen([first]) == seen([second]) == 2 * good_samples
    with (
        reading(str(path), shuffle="none", label="txt") as (_, batches),
        fails("too-many-faults", "data.dataset"),
    ):
        next(batches)


def test_no_manifest_runs_a_command(tmp_path: Path) -> None:
    more = {"num_samples": 1, "num_bytes": 1, "sha256": "", "index_sha256": "", "paths_sha256": ""}
    for file in ("pipe:cat a.tar", "pipe:curl http://x/a.tar"):
        with pytest.raises(ValueError, match="file"):
            Shard(name="train-0", file=file, **more)


def test_a_log_names_a_sample_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pretrain.data.reader import Unreadable

    log = BadSampleLog(tmp_path / "bad.jsonl")
    for position in (3, 90):  # its position differs in each epoch
        log.note(Unreadable(0, position, "a.tar", "k", "cut"), 1, known_as=("a.tar", "k"))
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 1
    assert capsys.readouterr().err.count("\n") == 1
    log.note(
        Unreadable(0, 4, "a.tar", "k", "cut"), 1, known_as=4
    )  # in another dataset with the same shard names
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 2


def test_a_preview_shows_what_a_stream_feeds(shards: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    stream = (
        f'"{shards}/part-{{00..11}}.tar", stream: true, num_classes: {CLASSES}, samples_per_epoch:'
        f" 80, image_size: {SIZE}"
    )
    train = "train: {duration: 1 epochs, global_batch_size: 8}"
    config.write_text(
        f"run_dir: r\nmodel: {{kind: mlp, depth: 1, width: 8}}\ndata: {{dataset: {stream},"
        f" eval_split: null}}\n{train}\n"
    )
    assert main(["preview", str(config), "--count", "8", "--out", str(tmp_path / "sheet.png")]) == 0
    assert Image.open(tmp_path / "sheet.png").width > 8 * SIZE


COMMANDS = {
    "wget --password=hush-word https://h/a.tar": "wget",
    "wget --http-password=hush-word https://h/a.tar": "wget",
    "curl -H 'X-Api-Key: hush-word' https://h/a.tar": "curl",
    "AWS_SECRET_ACCESS_KEY=hush-word/+== aws s3 cp s3://b/a.tar -": "aws",
    'KEY="a hush-word" aws s3 cp s3://b/a.tar -': "command",
    "KEY=$(echo a hush-word) aws s3 cp s3://b/a.tar -": "command",
    "sshpass -p hush-word ssh me@host cat a.tar": "sshpass",
    "'hush-word' a.tar": "command",
}
"""Command of a stream -> its program's name in the record."""


@pytest.mark.parametrize(("command", "program"), COMMANDS.items())
def test_records_hold_a_commands_program_and_hash_only(
    command: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = str(DataSettings(dataset=f"a.tar::pipe:{command}").model_dump(mode="json")["dataset"])
    assert record.startswith(f"a.tar::pipe:{program} (sha256 ") and "hush-word" not in record
    assert validate(DataSettings, {"dataset": record}).model_dump()["dataset"] == record
    assert DataSettings(dataset=f"a.tar::pipe:{command} ").model_dump()["dataset"] != record
    config = tmp_path / "c.yaml"
    config.write_text(
        "run_dir: r\nmodel: {kind: mlp, depth: 1, width: 8}\ndata: {dataset:"
        f" 'pipe:{command}: \n"
    )
    shown = shown_command(
        [
            "pretrain",
            "train",
            "c.yaml",
            f"dataset=pipe:{command}",
            f"data={{dataset: pipe:{command}}}",
        ]
    )
    wrong = (
        f"data.dataset=pipe:{command}",
        f"data.dataset=[pipe:{command}]",
        f"data.dataset=pipe:{command}: x: y",
        f"data.dataset={{pipe:{command}",
        f"pipe:{command}",
        f"data.extra_datasets=[{{dataset: 'pipe:{command}'}}]",
    )
    for words in [[str(config)], *(["configs/pretrain/demo_mlp.yaml", each] for each in wrong)]:
        assert main(["train", *words]) == 2
        said = capsys.readouterr()
        assert said.err and "Traceback" not in said.err
        shown += said.out + said.err
    assert "hush-word" not in shown


@pytest.mark.processes
def test_ranks_train_on_a_stream_and_card_and_result_say_so(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"""
run_dir: null
model: {{kind: mlp, depth: 1, width: 8, expansion: 2}}
data:
  stream: true
  dataset: "{shards}/part-{{00..05}}.tar::pipe:KEY=hush-word cat {shards}/part-{{06..11}}.tar"
  num_classes: {CLASSES}
  samples_per_epoch: 80
  image_size: {SIZE}
  eval_split: null
train: {{duration: 2 epochs, global_batch_size: 8, log_every_steps: 1}}
engine: {{precision: fp32, timeout_s: 60}}
""")
    for duration, steps in (("2 epochs", 20), ("24 steps", 24)):
        output = finish(
            start(config, tmp_path / "run", f"train.duration={duration}", journal_only=True)
        )
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert result["stream"] is True and result["step"] == steps and result["ranks"] == 2
    assert "resuming from step-00000020; the stream begins again, in another order" in output
    assert "a stream of 12 shards: " in output
    assert "0.485 0.456 0.406 / 0.229 0.224 0.225, ImageNet's by default" in output
    card = read_card(list_checkpoints(tmp_path / "run")[-1])
    assert card.stream and card.dataset == "stream of part" and card.classes == tuple("01234")
    assert "the command in data.dataset has the recorded hash" in output
    run = tmp_path / "run"
    assert not any(b"hush-word" in data for data in files_of(run).values())
    recorded = read_yaml(run / "config.yaml")["data"]["dataset"]
    assert "pipe:cat (sha256 " in recorded
    capsys.readouterr()
    other = f"dataset={shards}/part-{{00..05}}.tar::pipe:cat x"
    for words, *error in (
        ([str(run / "config.yaml")], "data.dataset", "missing-value"),
        ([str(config), f"run_dir={run}", other], "run_dir", "exists"),
    ):
        assert main(["train", *words, "train.duration=30 steps"]) == 2
        said = capsys.readouterr().err
        assert printed_errors(said) == [tuple(error)] and said.count("\n") == 1, said
