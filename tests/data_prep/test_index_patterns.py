"""Every mistake in a pattern of shards is one clear line."""

from pathlib import Path

import pytest

from data_prep.errors import UserError
from data_prep.index.locate import braces, expand
from tests.data_prep.conftest import Refused
from tests.data_prep.stock import index, sample, write_stock


def test_a_literal_range() -> None:
    assert braces("s-{098..101}.tar") == ["s-098.tar", "s-099.tar", "s-100.tar", "s-101.tar"]
    assert braces("a\\{train,{x}}") == ["a\\train", "a\\{x}"]


def test_globs_are_sorted_and_files_with_odd_names_are_found(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "[c].tar", "d.txt"):
        (tmp_path / name).touch()
    found = [str(tmp_path / name) for name in ("[c].tar", "a.tar", "b.tar")]
    assert expand(f"{tmp_path}/*.tar", storage={}) == found
    assert expand(f"{tmp_path}/[c].tar", storage={}) == found[:1]
    assert expand(f"file://{tmp_path}/a.tar", storage={}) == found[1:2]
    assert expand("https://host/{1,0}.tar?download=true", storage={}) == [
        "https://host/0.tar?download=true",
        "https://host/1.tar?download=true",
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("no-such.tar", "no-such.tar: no such file; a pattern may hold"),
        (
            "pipe:curl -s https://host/a.tar",
            "pipe: webdataset's commands are not run here; give what they read",
        ),
        ("pipe:cat a.tar", "pipe: webdataset's commands are not run here"),
        ("{tmp}/*.zip", "/*.zip: no file has such a name"),
        ("{tmp}", ": is a folder; name its shards, such as {tmp}/*.tar"),
        ("s-{{0..3.tar", "its braces do not match; write ranges as {{000..146}}"),
        ("s-0..3}}.tar", "its braces do not match; write ranges as"),
        ("s-{{0..99999999999}}.tar", "stands for more than 1,000,000 shards; is a range wrong?"),
        (
            "s-{{0..9999}}{{0..9999}}.tar",
            "stands for more than 1,000,000 shards; is a range wrong?",
        ),
        ("https://host/{{a,a}}.tar", "names https://host/a.tar twice; name every shard once"),
        ("https://host/*.tar", "a web server cannot be asked for its files; name them"),
        (
            "https://host/a.tar.gz",
            "is compressed, so its pictures cannot be reached one by one; decompress it",
        ),
        (
            "ftp://host/a.tar",
            (
                "ftp:// is not read; copy the shards here, or use http(s)://, s3://, gs://, az://"
                " or hf://"
            ),
        ),
        (
            "https://me:word@host/a.tar",
            (
                "https://host/a.tar: holds a password, which would stand in records; a manifest is"
                " for everybody"
            ),
        ),
        (
            "https://host/a.tar?X-Amz-Signature=ab",
            "https://host/a.tar: holds X-Amz-Signature, which would stand in records",
        ),
        (
            "https://host/a.tar?download=true&api_key=word",
            "https://host/a.tar: holds api_key, which would stand in",
        ),
        (
            "https://host/a.tar?X-Amz-Credential=word&auth=word",
            "a.tar: holds X-Amz-Credential, which would stand in",
        ),
        (
            "https://host/a.tar?download=word",
            (
                "https://host/a.tar: holds download, which would stand in records; a manifest is"
                " for everybody"
            ),
        ),
        (
            "https://host/a.tar?word",
            (
                "https://host/a.tar: holds a query, which would stand in records; a manifest is for"
                " everybody"
            ),
        ),
        (
            "https://host/a.tar#key=word",
            (
                "https://host/a.tar: holds key, which would stand in records; a manifest is for"
                " everybody"
            ),
        ),
        (
            "https://host/a.tar{{?key=word,}}",
            (
                "https://host/a.tar{{: holds key, which would stand in records; a manifest is for"
                " everybody"
            ),
        ),
        (
            "https://host/{{0..3.tar?key=word",
            ": holds key, which would stand in records; a manifest is for everybody",
        ),
        (
            "s3://bucket/a.tar?X-Amz-Signature=word",
            "s3://bucket/a.tar: holds X-Amz-Signature, which would stand in",
        ),
        (
            "gs://me:word@bucket/a.tar?key=word",
            "gs://bucket/a.tar: holds a password, which would stand in",
        ),
    ],
)
def test_a_mistake_in_a_pattern_is_one_line(tmp_path: Path, pattern: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(pattern.format(tmp=tmp_path), storage={})
    assert words.format(tmp=tmp_path) in str(caught.value)
    assert "word" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize("pattern", ["s3://b/x-*.tar", "s3://b/x-?.tar", "s3://b/x-[01].tar"])
def test_every_wildcard_is_looked_up_in_s3(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def listing(url: str, *, storage: dict[str, object]) -> list[str]:
        asked.append(url)
        return ["s3://b/x-1.tar", "s3://b/x-0.tar"]

    monkeypatch.setattr("data_prep.remote.listing", listing)
    assert expand(pattern, storage={}) == ["s3://b/x-0.tar", "s3://b/x-1.tar"]
    assert asked == [pattern]
    assert expand("https://[::1]/x-0.tar?download=true", storage={}) == [
        "https://[::1]/x-0.tar?download=true"
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--val", "SHARD"], "data_prep: splits: SHARD is named 2 times; every shard belongs to one split, once"),
        (["--train", "SHARD"], "data_prep: splits: SHARD is named 2 times; every shard belongs to one split, once"),
        (["label=jpg"], ("data_prep: label: 'jpg' will not do; write cls, txt, none, or json:FIELD such as " "json:meta.class")),
        (["label=json:.a"], ("data_prep: label: 'json:.a' will not do; write cls, txt, none, or json:FIELD such " "as json:meta.class")),
        (["splits.te-st=SHARD"], "data_prep: splits: 'te-st' will not do; a split is called with letters, digits and _"),
        (["splits.test=[]"], "data_prep: splits.test: [] has the wrong number of entries"),
        (["crop=centre"], "data_prep: crop: 'centre' is not one of its values; did you mean 'center'?"),
        (["classes_file=SHARD"], "data_prep: classes_file: SHARD cannot be read"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_settings_is_one_line(
    tmp_path: Path, words: list[str], complaint: str, refused: Refused
) -> None:
    shard = str(write_stock(tmp_path / "a.tar", [sample(1)]))
    refused(
        index(tmp_path / "out", shard, *(word.replace("SHARD", shard) for word in words)),
        complaint.replace("SHARD", shard),
    )
    assert not (tmp_path / "out").exists()
