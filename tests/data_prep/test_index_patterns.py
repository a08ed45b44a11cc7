"""Every mistake in a shard pattern is a one-line error."""

from pathlib import Path

import pytest

from data_prep.errors import Code
from data_prep.index.locate import braces, expand
from tests.data_prep.conftest import Refused
from tests.data_prep.stock import index, sample, write_stock
from tests.errors import fails


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
    ("pattern", "code"),
    [
        ("no-such.tar", "missing-path"),
        ("pipe:curl -s https://host/a.tar", "unsafe"),
        ("pipe:cat a.tar", "unsafe"),
        ("{tmp}/*.zip", "missing-path"),
        ("{tmp}", "bad-value"),
        ("s-{{0..3.tar", "bad-syntax"),
        ("s-0..3}}.tar", "bad-syntax"),
        ("s-{{0..99999999999}}.tar", "bad-value"),
        ("s-{{0..9999}}{{0..9999}}.tar", "bad-value"),
        ("https://host/{{a,a}}.tar", "conflict"),
        ("https://host/*.tar", "unsupported"),
        ("https://host/a.tar.gz", "unsupported"),
        ("ftp://host/a.tar", "unsupported"),
        ("https://me:word@host/a.tar", "bad-value"),
        ("https://host/{{0..3.tar?key=word", "bad-value"),
    ],
)
def test_a_mistake_in_a_pattern_is_one_line(tmp_path: Path, pattern: str, code: Code) -> None:
    with fails(code) as caught:
        expand(pattern.format(tmp=tmp_path), storage={})
    assert "word" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    ("words", "field", "code"),
    [
        (["--val", "SHARD"], "splits", "conflict"),
        (["--train", "SHARD"], "splits", "conflict"),
        (["label=jpg"], "label", "bad-value"),
        (["label=json:.a"], "label", "bad-value"),
        (["splits.te-st=SHARD"], "splits", "bad-value"),
        (["splits.test=[]"], "splits.test", "bad-value"),
        (["crop=centre"], "crop", "bad-value"),
        (["classes_file=SHARD"], "classes_file", "unreadable"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_settings_is_one_line(
    tmp_path: Path, words: list[str], field: str, code: str, refused: Refused
) -> None:
    shard = str(write_stock(tmp_path / "a.tar", [sample(1)]))
    refused(
        index(tmp_path / "out", shard, *(word.replace("SHARD", shard) for word in words)),
        f"data_prep: {field}: ",
        f"[{code}]",
    )
    assert not (tmp_path / "out").exists()
