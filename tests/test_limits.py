"""Every program names a shell limit that causes an error, in one line."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.images import Rejection
from data_prep.pictures import Picture
from tests.training import write_config

FILES, SIZE = resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "limit", "value"),
    [
        ("data_prep verify {dataset} --workers 2", FILES, 14),
        (
            (
                "data_prep build --source synthetic --out {out} source.num_train_per_class=9"
                " image_size=16 num_workers=1"
            ),
            SIZE,
            4096,
        ),
        ("pretrain train {config} run_dir={out}", FILES, 24),
        ("analysis paper mixer --out {out}", SIZE, 2048),
        ("cluster init {out}", SIZE, 2048),
    ],
)
def test_the_limit_is_named(
    words: str, limit: int, value: int, shapes: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, dataset=shapes)
    command = [
        sys.executable,
        "-m",
        *words.format(dataset=shapes, out=tmp_path / "out", config=config).split(),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)), env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    named = (
        f"`ulimit -n`, which is {value}"
        if limit == FILES
        else f"`ulimit -f`, which is {value // 1024}"
    )
    assert done.returncode != 0 and named in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("Traceback") == 0


def test_an_image_that_no_descriptor_is_left_for_is_not_rejected(tmp_path: Path) -> None:
    path, before = tmp_path / "image.png", resource.getrlimit(FILES)
    path.write_bytes(b"image")
    with pytest.raises(Rejection):
        Picture("x", str(tmp_path / "gone")).read()
    resource.setrlimit(FILES, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Picture("x", str(path)).read()
    finally:
        resource.setrlimit(FILES, before)
    assert Picture("x", str(path)).read() == b"image"
