"""`wide-mlps init DIR`: a folder from which jobs are submitted, for those who have installed a wheel and have no checkout.

It has the places that a checkout has: configs/ and cluster/ with site.env and the job scripts, which are the user's to edit, and
links: .venv to the environment that wide-mlps is installed in, the programs of cluster/ to their files there. So an upgrade of the
package is seen at once, and a job has the code as it was at its submission: cluster/snapshot copies it from where the links lead.
"""

import argparse
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("doctor", "submit", "snapshot", "environment.sh", "rank.sh", "start.sh")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wide-mlps", description="The programs are data_prep, pretrain, finetune and analysis.")
    parser.add_argument("--version", action="version", version=f"wide-mlps {version('wide-mlps')}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", dest="verb")
    words = "lay out a folder with configs/ and cluster/, from which jobs are submitted; what you have edited there is kept"
    verbs.add_parser("init", help=words, description=f"{words}.").add_argument("directory", metavar="DIR")
    options = parser.parse_args(arguments)
    fault = lay_out(Path(options.directory))
    if fault:
        print(f"wide-mlps init: {fault}", file=sys.stderr)
    return 2 if fault else 0


def lay_out(directory: Path) -> str:
    """Why not, or nothing. Typed again it adds what is missing and mends links."""
    python = Path(sys.prefix, "bin/python")
    if (directory / "pretrain").is_dir():
        return f"{directory} holds the code itself: cluster/ and configs/ are there"
    if directory.exists() and not directory.is_dir():
        return f"{directory} is a file; name another directory"
    if not python.exists():
        return f"no {python}; install wide-mlps into an environment of its own (python3 -m venv)"
    copies = {Path("cluster", path.name): path for path in [HERE / "site.env", *HERE.glob("*.slurm")]}
    copies |= {path.relative_to(HERE): path for path in HERE.glob("configs/*/*.*") if path.suffix in (".yaml", ".json")}
    kept = []
    for name, source in sorted(copies.items()):
        target = directory / name
        if target.exists():
            kept += [name] if target.read_bytes() != source.read_bytes() else []
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    links = {Path("cluster", name): HERE / name for name in PROGRAMS} | {Path(".venv"): Path(sys.prefix)}
    for name, leads_to in links.items():
        link = directory / name
        if link.exists() and not link.is_symlink():
            return f"{link} is there, and no link; move it away"
        link.unlink(missing_ok=True)
        link.symlink_to(leads_to)
    for name in kept:
        print(f"kept, as you have edited it: {directory / name}")
    print(f"{directory}: {len(copies)} configs and job scripts, Python of {sys.prefix}")
    print(f"next: cd {directory}, describe your site in cluster/site.env, then cluster/doctor")
    return ""
