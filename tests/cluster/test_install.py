"""install.sh's choice of a build of torch, from an index on loopback; the driver that a build
needs."""

import functools
import hashlib
import http.server
import importlib.metadata
import os
import re
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.check import check_driver, cuda_of_torch, find_driver
from cluster.submission import read_submission
from tests.ranks import REPOSITORY


def wheel(index: Path, name: str, version: str, *requires: str) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {each}\n" for each in requires
    )
    files = {
        f"{name}/version.py": f"__version__ = '{version}'\ncuda: Optional[str] = '12.6'\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
        file.writestr(
            f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        )


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    place = tmp_path / "index"
    torch, torchvision = (
        importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torchvision")
    )
    wheel(place, "torch", f"{torch}+cu126", "nvidia_cublas_cu12==12.6.4", "filelock")
    wheel(place, "torchvision", f"{torchvision}+cu126", f"torch=={torch}")
    wheel(place, "torch", torch)  # of another build: must not be taken
    wheel(place, "nvidia_cublas_cu12", "12.6.4")
    wheel(place, "filelock", importlib.metadata.version("filelock"))
    wheel(place, "filelock", "9999.0")  # must not move
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("install.sh", "requirements.lock"):
        shutil.copy(REPOSITORY / name, root)
    uv = REPOSITORY / ".venv/bin/uv"
    subprocess.run(
        [uv, "venv", "--quiet", "--offline", "--python", REPOSITORY / ".venv/bin/python", ".venv"],
        cwd=root,
        check=True,
    )
    (root / ".venv/bin/uv").symlink_to(uv)
    return root


def install(
    root: Path, *, index: str, build: str = "", word: str = "torch", pillow: str = ""
) -> subprocess.CompletedProcess[str]:
    """No other index is asked than that on loopback."""
    environment = os.environ | {
        "CUDA": build,
        "PILLOW": pillow,
        "TORCH_INDEX": index,
        "UV_DEFAULT_INDEX": index,
        "UV_NO_CACHE": "1",
        "UV_NO_CONFIG": "1",
    }
    return subprocess.run(
        ["sh", "install.sh", word],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def installed(root: Path) -> set[str]:
    return {
        path.name.removesuffix(".dist-info")
        for path in root.glob(".venv/lib/python3*/site-packages/*.dist-info")
    }


@pytest.mark.processes
def test_another_build_of_torch_takes_the_locks_versions_and_moves_nothing_else(
    checkout: Path, index: str
) -> None:
    done = install(checkout, index=index, build="cu126")
    assert done.returncode == 0, done.stderr
    torch, torchvision = (
        importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torchvision")
    )
    family = {
        f"torch-{torch}+cu126",
        f"torchvision-{torchvision}+cu126",
        "nvidia_cublas_cu12-12.6.4",
    }
    assert installed(checkout) == family  # filelock is for the lock to install
    (said,) = [line for line in done.stderr.splitlines() if "without a hash" in line]
    assert all(
        re.search(rf"\b{name.replace('_', '-')}==", said)
        for name in ("torch", "torchvision", "nvidia_cublas_cu12")
    )
    assert (checkout / ".venv/cuda").read_text() == "cu126\n"
    assert cuda_of_torch(checkout / ".venv") == "12.6"

    refused = install(checkout, index=index, build="cu118")  # which the index lacks
    assert refused.returncode == 1
    assert "CUDA= to another build" in refused.stderr
    assert installed(checkout) == family
    assert (checkout / ".venv/cuda").read_text() == "cu126\n"  # and the next plain `make` keeps it


@pytest.mark.processes
@pytest.mark.parametrize(
    ("build", "code", "said"), [("12.6", 2, "is not a build of torch"), ("/opt/cuda", 2, "ignored")]
)
def test_words_that_name_no_build(checkout: Path, build: str, code: int, said: str) -> None:
    done = install(checkout, index="http://127.0.0.1:9/", build=build)
    assert said in done.stderr
    assert done.returncode == code
    assert not installed(checkout)


@pytest.mark.processes
def test_plain_pillow_can_be_chosen_and_the_choice_is_kept(
    checkout: Path, index: str, tmp_path: Path
) -> None:
    lock = REPOSITORY / "requirements.lock"
    assert re.search(
        r"^pillow==(1[3-9]|[2-9]\d)\.", lock.read_text(), re.MULTILINE
    )  # what a user without Pillow-SIMD gets
    wheel(tmp_path / "index", "pillow", "13.0.0")
    (made,) = (tmp_path / "index/pillow").glob("*.whl")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    locked = f"pillow==13.0.0 ; platform_machine != 'x86_64' \\\n    --hash=sha256:{digest}\n"
    (checkout / "requirements.lock").write_text(locked)
    assert install(checkout, index=index, word="pillow", pillow="fast").returncode == 2
    for chosen in ("plain", ""):
        done = install(checkout, index=index, word="pillow", pillow=chosen)
        assert done.returncode == 0, done.stderr
        assert installed(checkout) == {"pillow-13.0.0"}


@pytest.mark.parametrize(
    ("driver", "cuda", "fix"),
    [
        ("580.65.06", "13.0", ""),
        ("575.57.08", "13.0", "run make CUDA=cu128"),
        ("525.60.13", "12.8", ""),
        ("470.256.02", "12.6", "install driver 525.60 or newer"),
        ("470.256.02", "13.0", "install driver 525.60 or newer"),
        ("470.256.02", "14.1", ""),  # is not known
    ],
)
def test_a_driver_that_is_too_old_has_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    version = Path(".venv/lib/python3.11/site-packages/torch/version.py")
    version.parent.mkdir(parents=True)
    version.write_text(f"cuda: Optional[str] = '{cuda}'\n")
    (finding,) = check_driver(read_submission([]), {"CUDA_DRIVER": driver})
    assert finding.verdict == ("FAULT" if fix else "ok")
    assert finding.fix.startswith(fix)
    assert not [*check_driver(read_submission([]), {"CUDA_DRIVER": driver, "RANK_PYTHON": "x"})]


def test_the_driver_is_that_of_site_env_or_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tmp_path / "version"
    assert find_driver({}, loaded=loaded) is None
    loaded.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build "
        " (dvs-builder)  Thu\nGCC version:\n"
    )
    assert find_driver({}, loaded=loaded) == "570.86.15"
    assert find_driver({"CUDA_DRIVER": "535.1"}, loaded=loaded) == "535.1"
    monkeypatch.chdir(tmp_path)
    version = Path(".venv/lib/python3.11/site-packages/torch/version.py")
    version.parent.mkdir(parents=True)
    shutil.copy(Path(torch.__file__).with_name("version.py"), version)
    assert cuda_of_torch(Path(".venv")) == torch.version.cuda
