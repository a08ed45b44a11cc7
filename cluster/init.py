"""`wide-mlps init DIR`: create a folder to submit jobs from, for installations without a checkout.

The user may edit configs/, cluster/site.env and the job scripts in the folder. The rest are links:
.venv to the environment of wide-mlps, and the programs of cluster/ to the package. An upgrade of
the package thus applies at once. A submitted job keeps its code, because cluster/snapshot copies
the targets of the links.
"""

import argparse
import sys
from pathlib import Path

from cluster.schemas import write_schemas
from data_prep.errors import UserError
from data_prep.publish import make_directory, write_atomic

HERE = Path(__file__).resolve().parent
PROGRAMS = ("submit", "snapshot", "environment.sh", "rank.sh", "start.sh")


def lay_out(options: argparse.Namespace) -> int:
    """Create the folder. A second call adds missing files and repairs links."""
    directory, python = Path(options.directory), Path(sys.prefix, "bin/python")
    if (directory / "pretrain").is_dir():
        raise UserError(
            str(directory),
            "this checkout already has cluster/ and configs/",
            "choose an empty folder",
            code="exists",
        )
    if not python.exists():
        raise UserError(
            str(python),
            "no such file",
            "install wide-mlps into its own environment (python3 -m venv)",
            code="missing-path",
        )
    copies = {
        Path("cluster", path.name): path for path in [HERE / "site.env", *HERE.glob("*.slurm")]
    }
    copies |= {path.relative_to(HERE): path for path in HERE.glob("configs/*/*.yaml")}
    kept = []
    for name, source in sorted(copies.items()):
        target = directory / name
        make_directory(target.parent)
        if not target.exists():
            write_atomic(target, source.read_bytes())
        elif target.read_bytes() != source.read_bytes():
            kept.append(target)
    write_schemas(directory / "configs/schemas")
    links = {Path("cluster", name): HERE / name for name in PROGRAMS} | {
        Path(".venv"): Path(sys.prefix)
    }
    for name, leads_to in links.items():
        link = directory / name
        if link.exists() and not link.is_symlink():
            raise UserError(str(link), "this is not a link", "move it away", code="exists")
        link.unlink(missing_ok=True)
        link.symlink_to(leads_to)
    for target in kept:
        print(f"kept, although the package has another version: {target}")
    print(f"{directory} has {len(copies)} configs and job scripts, and uses {sys.prefix}")
    print(
        f"next: cd {directory}, describe your site in cluster/site.env, then cluster/submit --check"
    )
    return 0
