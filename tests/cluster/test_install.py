"""install.sh: Python, index, wheelhouse, Pillow and torch from an index on loopback, and the driver
that a build needs."""

import functools
import hashlib
import http.server
import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from cluster.check import check_driver, compare_driver, cuda_of_torch, find_driver
from cluster.submission import read_submission
from data_prep import __version__
from tests.cluster.checkouts import stand_in
from tests.ranks import REPOSITORY

TORCH, TORCHVISION = (
    importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torchvision")
)


def wheel(
    index: Path, name: str, version: str, *requires: str, more: Mapping[str, str] | None = None
) -> None:
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
    files |= more or {}
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            member = zipfile.ZipInfo(path)
            member.external_attr = 0o100755 << 16  # a regular, executable file
            file.writestr(member, text)
        file.writestr(
            f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        )


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    place = tmp_path / "index"
    wheel(place, "torch", f"{TORCH}+cu126", "nvidia_cublas_cu12==12.6.4", "filelock")
    wheel(place, "torchvision", f"{TORCHVISION}+cu126", f"torch=={TORCH}")
    wheel(place, "torch", TORCH)  # another build, which must not be installed
    wheel(place, "nvidia_cublas_cu12", "12.6.4")
    wheel(place, "filelock", importlib.metadata.version("filelock"))
    wheel(place, "filelock", "9999.0")  # must not be upgraded
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def locked(index: Path, name: str, version: str) -> str:
    """Return the line of a lock file for a wheel."""
    (made,) = (index / name).glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return (
        f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}\n"
    )


def path_without(folder: Path, *names: str) -> Path:
    """Return a folder with all programs of this machine except `names` and their versions."""
    folder.mkdir()
    for each in (path for place in ("/usr/bin", "/bin") for path in Path(place).iterdir()):
        if not each.name.startswith(names) and not (folder / each.name).is_symlink():
            (folder / each.name).symlink_to(each)
    return folder


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
    root: Path, *words: str, index: str = "", build: str = "", pillow: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run install.sh with the index on loopback only, and without the code of this checkout."""
    other = ("PIP_", "UV_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(other)}
    environment = kept | {
        "CUDA": build,
        "PILLOW": pillow,
        "TORCH_INDEX": index,
        "UV_DEFAULT_INDEX": index,
        "UV_NO_CACHE": "1",
        "UV_NO_CONFIG": "1",
        "UV_HTTP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        **settings,
    }
    return subprocess.run(
        ["/bin/sh", "install.sh", *words],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def stand_in_lock(index: Path) -> dict[str, str]:
    """Add stand-ins of uv and Pillow to the index. Return {name: line of a lock file}."""
    real = REPOSITORY / ".venv/bin/uv"
    pil = {"PIL/__init__.py": "__version__ = '13.0.0'", "PIL/Image.py": ""}
    wheel(index, "uv", "9.0", more={"uv-9.0.data/scripts/uv": f'#!/bin/sh\nexec {real} "$@"\n'})
    wheel(index, "pillow", "13.0.0", more=pil)
    names = {"uv": "9.0", "pillow": "13.0.0", "nvidia-cublas-cu12": "12.6.4"}
    return {name: locked(index, name, number) for name, number in names.items()}


def installed(root: Path) -> set[str]:
    return {
        path.name.removesuffix(".dist-info")
        for path in root.glob(".venv/lib/python3*/site-packages/*.dist-info")
    }


@pytest.mark.processes
def test_another_build_of_torch_takes_the_locks_versions_and_moves_nothing_else(
    checkout: Path, index: str
) -> None:
    done = install(checkout, "torch", index=index, build="cu126")
    assert done.returncode == 0, done.stderr
    family = {
        f"torch-{TORCH}+cu126",
        f"torchvision-{TORCHVISION}+cu126",
        "nvidia_cublas_cu12-12.6.4",
    }
    assert installed(checkout) == family  # only the lock file installs filelock
    (said,) = [line for line in done.stderr.splitlines() if "against a hash" in line]
    assert all(
        re.search(rf"\b{name.replace('_', '-')}==", said)
        for name in ("torch", "torchvision", "nvidia_cublas_cu12")
    )
    assert (checkout / ".venv/cuda").read_text() == "cu126\n"
    assert cuda_of_torch(checkout / ".venv") == "12.6"

    # a build that is not on the index
    refused = install(checkout, "torch", index=index, build="cu118")
    assert refused.returncode == 1
    assert "CUDA= to another build" in refused.stderr
    assert installed(checkout) == family
    assert (checkout / ".venv/cuda").read_text() == "cu126\n"  # the next plain `make` uses it


@pytest.mark.processes
@pytest.mark.parametrize(
    ("build", "code", "said"), [("12.6", 2, "is not a build of torch"), ("/opt/cuda", 2, "ignored")]
)
def test_words_that_name_no_build(checkout: Path, build: str, code: int, said: str) -> None:
    done = install(checkout, "torch", index="http://127.0.0.1:9/", build=build)
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
    )  # for a user without Pillow-SIMD
    wheel(tmp_path / "index", "pillow", "13.0.0")
    line = locked(tmp_path / "index", "pillow", "13.0.0")
    line = line.replace(" \\", " ; platform_machine != 'x86_64' \\")
    (checkout / "requirements.lock").write_text(line)
    assert install(checkout, "pillow", index=index, pillow="fast").returncode == 2
    for chosen in ("plain", ""):
        done = install(checkout, "pillow", index=index, pillow=chosen)
        assert done.returncode == 0, done.stderr
        assert installed(checkout) == {"pillow-13.0.0"}


@pytest.mark.processes
def test_without_a_compiler_plain_pillow_is_installed_and_the_reason_printed(
    checkout: Path, index: str, tmp_path: Path
) -> None:
    wheel(tmp_path / "index", "pillow", "13.0.0")
    (checkout / "requirements.lock").write_text(locked(tmp_path / "index", "pillow", "13.0.0"))
    path = path_without(tmp_path / "bin", "cc", "gcc")
    done = install(checkout, "pillow", index=index, PATH=str(path))
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"pillow-13.0.0"}
    assert "C compiler" in done.stderr or os.uname().machine != "x86_64"
    assert (checkout / ".venv/pil").read_text() == "simd\n"  # a later run tries again


@pytest.mark.processes
def test_other_systems_are_refused_in_one_line(checkout: Path, tmp_path: Path) -> None:
    path = path_without(tmp_path / "bin", "uname")
    stand_in(path, "uname", "echo Darwin")
    done = install(checkout, PATH=str(path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Darwin is not supported" in line
    (recipe,) = re.findall(r"-f (\S+)", line)
    assert (REPOSITORY / recipe).exists()
    assert not installed(checkout)


@pytest.mark.processes
@pytest.mark.parametrize("has_uv", [True, False])
def test_a_newer_python_is_found_in_path_or_downloaded_with_uv(
    checkout: Path, tmp_path: Path, has_uv: bool
) -> None:
    shutil.rmtree(checkout / ".venv")
    path, log = path_without(tmp_path / "bin", "python", "uv"), tmp_path / "log"
    stand_in(path, "python3", f'case $* in "-m pip"*) echo "$*" >> {log}; mkdir -p .cache/uv-program/bin;'
            f" cp {tmp_path}/uv .cache/uv-program/bin;; *) exit 1;; esac")  # fmt: skip
    # a usable Python that logs requests for a virtual environment
    usable = f'case $* in "-c "*) ;; *) echo "$0 $*" >> {log}; exit 1;; esac'
    stand_in(tmp_path, "brought", usable)
    stand_in(
        tmp_path, "uv", f'echo "uv $*" >> {log}; case $* in *find*) echo {tmp_path}/brought;; esac'
    )
    if has_uv:
        shutil.copy(tmp_path / "uv", path)
    done = install(checkout, PATH=str(path))
    assert done.returncode == 1, "the Python makes no virtual environment"
    lines = log.read_text().splitlines()
    assert lines[-1] == f"{tmp_path}/brought -m venv --clear .venv"
    assert [line for line in lines if line.startswith("uv python install")]
    assert [line for line in lines if "--require-hashes" in line] == lines[: not has_uv]

    stand_in(path, "python3.12", usable)
    install(checkout, PATH=str(path))
    assert log.read_text().splitlines()[len(lines) :] == [
        f"{path}/python3.12 -m venv --clear .venv"
    ]
    refused = install(checkout, PATH=str(path), PYTHON=str(path / "python3"))
    assert refused.returncode == 1
    assert f"PYTHON={path}/python3 " in refused.stderr


@pytest.mark.processes
def test_uv_asks_the_index_of_pip(checkout: Path, tmp_path: Path) -> None:
    stand_in(tmp_path, "uv", f'echo "$UV_DEFAULT_INDEX $UV_CACHE_DIR" >> {tmp_path}/log')
    (checkout / ".venv/bin/uv").unlink()
    (checkout / ".venv/bin/uv").symlink_to(tmp_path / "uv")
    mirror = "http://127.0.0.1:9/mirror"
    install(checkout, "pillow", pillow="plain", UV_DEFAULT_INDEX="", PIP_INDEX_URL=mirror)
    install(checkout, "pillow", pillow="plain", UV_DEFAULT_INDEX="", UV_CACHE_DIR="/elsewhere")
    asked = (tmp_path / "log").read_text().splitlines()
    assert {*asked} == {f"{mirror} {checkout}/.cache/uv", " /elsewhere"}


@pytest.mark.processes
@pytest.mark.slow
def test_a_wheelhouse_installs_without_an_index(checkout: Path, index: str, tmp_path: Path) -> None:
    """A lock file of a few packages, without the test lock. The project's build is a stand-in,
    because the index has no setuptools."""
    place, wheels = tmp_path / "index", tmp_path / "wheels"
    lock = stand_in_lock(place)
    wheel(place, "pytest", "99.0")
    wheel(tmp_path, "project", "1.0")
    built = "project-1.0-py3-none-any.whl"
    (checkout / "backend.py").write_text(
        "import shutil\ndef build_editable(folder, *_):\n"
        f"    shutil.copy({str(tmp_path / 'project' / built)!r}, folder)\n    return {built!r}\n"
    )
    (checkout / "pyproject.toml").write_text(
        "[project]\nname = 'project'\nversion = '1.0'\n"
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (checkout / "data_prep").mkdir()
    (checkout / "requirements.lock").write_text("".join(lock.values()))
    (checkout / "requirements-dev.lock").write_text(locked(place, "pytest", "99.0"))
    done = install(checkout, "wheelhouse", "../wheels", index=index)
    assert done.returncode == 0, done.stderr
    assert {path.name.split("-")[0] for path in wheels.iterdir()} == {
        name.replace("-", "_") for name in lock
    }
    assert "pillow-13.0.0" not in installed(checkout)

    house = {"index": "http://127.0.0.1:9/", "pillow": "plain"}
    done = install(checkout, WHEELHOUSE=str(wheels), **house)
    assert done.returncode == 0, done.stderr
    users = {"uv-9.0", "pillow-13.0.0", "nvidia_cublas_cu12-12.6.4", "project-1.0"}
    assert users <= installed(checkout)
    assert (checkout / ".venv/.installed").exists()
    assert not (checkout / ".venv/.dev").exists()
    # in an environment without dev packages
    done = install(checkout, "dev", index=index, pillow="plain")
    assert done.returncode == 0, done.stderr
    assert installed(checkout) >= {*users, "pytest-99.0"}
    assert (checkout / ".venv/.dev").exists()

    with zipfile.ZipFile(next(wheels.glob("pillow*")), "a") as file:
        file.writestr("PIL/more.py", "")
    refused = install(checkout, "pillow", WHEELHOUSE=str(wheels), **house)
    assert refused.returncode != 0
    assert "hash" in refused.stderr.lower()
    assert install(checkout, WHEELHOUSE="../nowhere", **house).returncode == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "copied"),
    [
        ("cluster/Containerfile", r"^COPY (.*) /opt/wide-mlps/"),
        ("cluster/apptainer.def", r"^ +(\S+\.\S+) /opt/wide-mlps/"),
        ("docs/cluster.md", r"^ +cp (.*) /opt/wide-mlps "),
    ],
)
def test_an_image_installs_packages_before_it_has_the_code(
    checkout: Path, index: str, tmp_path: Path, recipe: str, copied: str
) -> None:
    before, _, after = (REPOSITORY / recipe).read_text().partition("RUN sh ")
    (packages,) = checkout.glob(".venv/lib/python3*/site-packages")
    for pattern in ("pip*", "setuptools*", "_distutils_hack"):  # of an image's own Python and lock
        for path in Path(sysconfig.get_path("purelib")).glob(pattern):
            (packages / path.name).symlink_to(path)
    names = " ".join(re.findall(copied, before, re.MULTILINE)).split()
    assert {"install.sh", "requirements.lock", "cluster/image.sh"} < {*names}
    for name in names:
        shutil.copy(REPOSITORY / name, checkout)
    lock = stand_in_lock(tmp_path / "index")
    (checkout / "requirements.lock").write_text("".join(lock.values()))
    done = install(checkout, index=index, pillow="plain")
    assert done.returncode == 0, done.stderr
    assert "uv-9.0" in installed(checkout)
    if after:
        for name in " ".join(re.findall(copied, after, re.MULTILINE)).split():
            (checkout / name).symlink_to(REPOSITORY / name)
        (command,) = re.findall(r"^RUN cd /opt/wide-mlps && (.*--editable \.)", after, re.MULTILINE)
        (checkout / "install.sh").write_text(command)
        done = install(checkout)
        assert done.returncode == 0, done.stderr
        assert f"wide_mlps-{__version__}" in installed(checkout)


@pytest.mark.processes
def test_install_warns_of_an_old_driver_before_the_download(checkout: Path) -> None:
    for name in ("cluster", "data_prep"):
        (checkout / name).symlink_to(REPOSITORY / name)
    warned = {}
    for driver in ("470.256.02", "550.54"):
        done = install(
            checkout, "torch", index="http://127.0.0.1:9/", build="cu126", CUDA_DRIVER=driver
        )
        assert done.returncode == 1  # the index is unreachable
        warned[driver] = [line for line in done.stderr.splitlines() if "warning: driver" in line]
    assert len(warned["470.256.02"]) == 1
    assert not warned["550.54"]


@pytest.mark.parametrize(
    ("driver", "cuda", "fix"),
    [
        ("580.65.06", "13.0", ""),
        ("575.57.08", "13.0", "install a newer driver, or run CUDA=cu128 sh install.sh torch"),
        ("525.60.13", "12.8", ""),
        ("470.256.02", "12.6", "install driver 525.60 or newer"),
        ("470.256.02", "13.0", "install driver 525.60 or newer"),
        ("470.256.02", "14.1", ""),  # an unknown build
    ],
)
def test_a_driver_that_is_too_old_has_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    version = Path(".venv/lib/python3.11/site-packages/torch/version.py")
    version.parent.mkdir(parents=True)
    version.write_text(f"cuda: Optional[str] = '{cuda}'\n")
    Path("install.sh").touch()
    (finding,) = check_driver(read_submission([]), {"CUDA_DRIVER": driver})
    assert finding.verdict == ("FAULT" if fix else "ok")
    assert finding.fix.startswith(fix)
    assert not [*check_driver(read_submission([]), {"CUDA_DRIVER": driver, "RANK_PYTHON": "x"})]


def test_a_folder_without_install_sh_has_a_fix_with_the_versions_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fix = compare_driver("575.57.08", "13.0").fix
    lock = (REPOSITORY / "requirements.lock").read_text()
    locked = re.findall(r"^torch(?:vision)?==\S+", lock, re.MULTILINE)
    assert re.findall(r"(\S+)\+cu128", fix) == locked and "install.sh" not in fix


def test_the_driver_is_that_of_site_env_or_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tmp_path / "version"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_driver({}, loaded=loaded) is None
    stand_in(tmp_path, "nvidia-smi", "echo 535.183.01; echo 535.183.01")  # two GPUs
    assert find_driver({}, loaded=loaded) == "535.183.01"
    stand_in(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
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
