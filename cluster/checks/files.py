"""What is seen without SLURM: the environment that jobs run Python in, the file systems, the network interfaces of this machine."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cluster.checks.finding import Finding, ask

SHARED = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph glusterfs pvfs2 orangefs panfs wekafs cifs smb3 afs 9p virtiofs juicefs dfuse".split()  # noqa: SIM905
)
LOCAL = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay overlayfs f2fs".split())  # noqa: SIM905
_DIRECTORIES = ("data", "runs", "jobs")
_LEAST_FREE_GB = 50.0
"""A B-12/Wi-1024 with LION keeps 1.5 GB a checkpoint, three of them, and raw ImageNet-21k at 64 px takes 140 GB."""


# ---- Python ---------------------------------------------------------------------------------------------------------


def check_repository() -> list[Finding]:
    missing = [
        name
        for name in ("pyproject.toml", "requirements.lock", "cluster", "pretrain", "configs")
        if not Path(name).exists()
    ]
    if missing:
        found = f"{Path.cwd()} is not a whole checkout: no {', '.join(missing)}"
        return [Finding("repository", "FAULT", found, "git status; git checkout what is missing")]
    return []


def check_python(environment: Mapping[str, str]) -> list[Finding]:
    """The container if one is set, otherwise .venv."""
    apptainer, pyxis = environment.get("APPTAINER_IMAGE", ""), environment.get("PYXIS_IMAGE", "")
    if apptainer and pyxis:
        return [
            Finding(
                "container",
                "FAULT",
                "both APPTAINER_IMAGE and PYXIS_IMAGE are set",
                "keep one of them in cluster/site.env",
            )
        ]
    if apptainer:
        return [_apptainer(apptainer, environment), *_hidden_links(environment)]
    if pyxis:
        return [_pyxis(pyxis, environment), *_hidden_links(environment)]
    return [_venv()]


def _venv() -> Finding:
    stamp, lock = Path(".venv/.installed"), Path("requirements.lock")
    if not os.access(".venv/bin/python", os.X_OK):
        return Finding("python", "FAULT", "no .venv, and no container image is set", "sh install.sh")
    if not stamp.exists():
        return Finding("python", "FAULT", ".venv is half installed: its last step is missing", "sh install.sh")
    if not lock.exists():
        return Finding(
            "python", "warning", ".venv is there, and no requirements.lock says what must be in it", "see above"
        )
    if stamp.stat().st_mtime < lock.stat().st_mtime and not _installed_from(lock):
        return Finding("python", "FAULT", ".venv is older than requirements.lock", "sh install.sh brings it up to date")
    return Finding("python", "ok", ".venv is whole and as new as requirements.lock")


def _installed_from(lock: Path) -> bool:
    """Whether install.sh took these very lines: a checkout gives files new dates without changing them."""
    taken = Path(".venv/all.lock")
    without_pillow = re.sub(r"^pillow(?:.*\\\n)*.*\n", "", lock.read_text(), flags=re.MULTILINE)
    return taken.exists() and taken.read_text() == without_pillow


def _apptainer(image: str, environment: Mapping[str, str]) -> Finding:
    program = next(
        (name for name in ("apptainer", "singularity") if shutil.which(name, path=environment.get("PATH"))), None
    )
    if "://" in image:
        found = f"APPTAINER_IMAGE={image}: each rank would fetch and unpack it at each start"
        return Finding("container", "FAULT", found, "apptainer pull (or build) it once into a .sif file, and name that")
    if not os.access(image, os.R_OK):
        remedy = "apptainer build IMAGE.sif cluster/apptainer.def makes one (docs/cluster.md)"
        return Finding("container", "FAULT", f"APPTAINER_IMAGE={image}: no such readable file", remedy)
    if program is None:
        remedy = "it may be a module: write module load apptainer into cluster/site.env"
        return Finding("container", "FAULT", "neither apptainer nor singularity is in PATH", remedy)
    return Finding("container", "ok", f"{program} runs {image}")


def _pyxis(image: str, environment: Mapping[str, str]) -> Finding:
    if ("/" in image and image.startswith(("/", "."))) or image.endswith(".sqsh"):
        if not os.access(image, os.R_OK):
            remedy = "docs/cluster.md says how to make one; nodes must see it, too"
            return Finding("container", "FAULT", f"PYXIS_IMAGE={image}: no such readable file", remedy)
        if not image.startswith("/"):
            return Finding("container", "FAULT", f"PYXIS_IMAGE={image}: not an absolute path", "write the whole path")
    if "--container-image" not in ask(["srun", "--help"], environment=environment).out:
        remedy = "ask the site for Pyxis, or use APPTAINER_IMAGE or .venv instead"
        return Finding("container", "FAULT", "this srun knows no --container-image: Pyxis is not installed", remedy)
    return Finding("container", "ok", f"srun (Pyxis) runs {image}")


def _hidden_links(environment: Mapping[str, str]) -> list[Finding]:
    """A container sees the repository and CONTAINER_MOUNTS; what the repository links to elsewhere is missing in it."""
    mounts = [Path(mount.split(":")[0]) for mount in environment.get("CONTAINER_MOUNTS", "").split(",") if mount]
    seen = [Path.cwd().resolve(), *(mount.resolve() for mount in mounts)]
    hidden = {name: Path(name).resolve() for name in _DIRECTORIES if Path(name).is_symlink()}
    hidden = {name: target for name, target in hidden.items() if not any(target.is_relative_to(path) for path in seen)}
    missing = [str(mount) for mount in mounts if not mount.exists()]
    return [
        *(
            Finding(
                "container",
                "FAULT",
                f"{name}/ leads to {target}, which it does not see",
                f"add {target} to CONTAINER_MOUNTS",
            )
            for name, target in hidden.items()
        ),
        *(
            Finding(
                "container",
                "warning",
                f"CONTAINER_MOUNTS: no {path} here",
                "fine if nodes have it; otherwise it cannot start",
            )
            for path in missing
        ),
    ]


# ---- file systems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    options: tuple[str, ...] = ()


def read_mounts(text: str) -> list[Mount]:
    """Of /proc/self/mountinfo: fields up to " - " vary in number, the kind follows; later mounts hide earlier ones."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        kind, *_, options = after.split()
        mounts.append(Mount(point, kind.removeprefix("fuse."), tuple(options.split(","))))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount:
    inside = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(inside), key=lambda mount: len(mount.point), default=Mount("/", "unknown"))


def check_files() -> list[Finding]:
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text())
    places: dict[Mount, list[str]] = {}
    for name in (".", *_DIRECTORIES):
        places.setdefault(mount_of(_existing(name).resolve(), mounts), []).append(
            "the repository" if name == "." else f"{name}/"
        )
    findings = []
    for mount, names in places.items():
        findings.append(told_of_mount(mount, names))
    for name in ("runs", "jobs"):
        findings += _writes(_existing(name), name)
    return findings + _space()


def _existing(name: str) -> Path:
    path = Path(name)
    return path if path.exists() else Path()


def told_of_mount(mount: Mount, names: list[str]) -> Finding:
    where = f"{', '.join(names)} on {mount.kind} ({mount.point})"
    if {"localflock", "local_lock=all", "local_lock=flock"} & set(mount.options):
        remedy = (
            "another file system, or ask the site for a mount with flock; until then only one job at a time for a run"
        )
        return Finding("files", "warning", f"{where}, where nodes do not see each other's locks", remedy)
    if mount.kind in SHARED:
        return Finding("files", "ok", f"{where}, which nodes share")
    kind = "a local file system" if mount.kind in LOCAL else "a kind of file system that the doctor does not know"
    remedy = (
        "fine only if every node sees the same directory: --on-nodes looks; otherwise work on the site's shared storage"
    )
    return Finding("files", "warning", f"{where}: {kind}", remedy)


def _writes(directory: Path, name: str) -> list[Finding]:
    """Checkpoints and job records need files that are flushed, then renamed over an older one."""
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            old.write_text("old")
            with open(new, "w") as file:
                file.write("new")
                file.flush()
                os.fsync(file.fileno())
            new.rename(old)
            whole = old.read_text() == "new"
            with open(old, "r+") as file:  # NFS locks only what may be written
                has_locks = _can_lock(file)
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "make room, or mend its permissions" if directory.exists() else "mkdir it"
        return [Finding("files", "FAULT", f"{name}/ cannot be written: {reason}", remedy)]
    if not has_locks:
        remedy = (
            "work on another file system, or ask the site to mount it with flock: two jobs could write one run here"
        )
        return [Finding("files", "FAULT", f"{name}/ is on a file system without locks", remedy)]
    if not whole:
        return [
            Finding("files", "FAULT", f"{name}/: a renamed file keeps its old contents", "work on another file system")
        ]
    return []


def _can_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _space() -> list[Finding]:
    free_gb = shutil.disk_usage(_existing("runs")).free / 1e9
    if free_gb < 1:
        return [
            Finding(
                "space",
                "FAULT",
                f"{free_gb:.1f} GB free for runs/",
                "make room: a checkpoint of the large models takes 1.5 GB",
            )
        ]
    if free_gb < _LEAST_FREE_GB:
        remedy = "lower checkpoint.keep_last, or link runs/ to a larger file system"
        return [Finding("space", "warning", f"{free_gb:.0f} GB free for runs/", remedy)]
    return [Finding("space", "ok", f"{free_gb:,.0f} GB free for runs/ (a quota may be tighter)")]


# ---- network ----------------------------------------------------------------------------------------------------------


def check_interfaces(environment: Mapping[str, str], *, here: list[str] | None = None) -> list[Finding]:
    """Only a warning: a login node may have other networks than the nodes."""
    here = sorted(path.name for path in Path("/sys/class/net").iterdir()) if here is None else here
    chosen = {name: environment.get(name, "") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")}
    findings = [
        Finding(
            "network",
            "warning",
            f"{name}={value}: this machine has only {', '.join(here)}",
            "fine if the nodes have it: --on-nodes looks",
        )
        for name, value in chosen.items()
        if value and not interface_exists(value, here)
    ]
    without = [name for name, value in chosen.items() if not value]
    if len(without) == 1:
        found = f"{without[0]} is not set, though the other of the two is"
        findings.append(Finding("network", "warning", found, "ranks use both libraries: set both to the same network"))
    return findings


def interface_exists(value: str, here: list[str]) -> bool:
    """NCCL's rules: beginnings of names with commas between, `=` for whole names, `^` for all but these."""
    names = value.lstrip("^=").split(",")
    exact = "=" in value[:2]
    matches = [each for each in here if any(each == name if exact else each.startswith(name) for name in names)]
    return len(matches) < len(here) if value.startswith("^") else bool(matches)
