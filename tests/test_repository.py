"""The repository: README's commands run as printed, one PIL is installed, the lock file is
complete, and long files have a reason."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import PIL
import pytest

from data_prep.manifest import load_manifest
from tests.budgets import num_characters
from tests.data_prep.samples import encoded, picture, webp, write_files
from tests.forked import begin, wait
from tests.language import texts_of_markdown
from tests.ranks import REPOSITORY
from tests.site_check import remote_loads

PACKAGES = ("data_prep", "pretrain", "finetune", "analysis", "cluster", "wide_mlps")


PAGES = (
    "README.md",
    *(
        f"docs/{page}.md"
        for page in ("start/quickstart", "data", "training", "transfer", "analysis")
    ),
    *sorted(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob("docs/analysis/*.md")),
)
"""Pages in the order of their commands. Commands of an earlier page are not repeated."""
DOCS = sorted({*(REPOSITORY / "docs").rglob("*.md")} - {*(REPOSITORY / "docs/reference").glob("*")})
"""All hand-written pages of the site."""
UNMARKED = {"python.md"}
"""Pages whose code blocks have no marks: other tests run the blocks of python.md."""
MANY_FILES = {
    "data_prep": (
        "the files of the contract, which the floors above import, stand in one place beside the"
        " rooms"
    ),
    "data_prep/sources": "a file for each archive layout",
    "pretrain/models": "a file for each family of models, and for what each costs",
    "cluster": (
        "what one passes to sbatch stands in one place: templates, the site's settings, and the"
        " commands beside them"
    ),
}
"""Folders of more than 12 files, with the reason."""


def printed_commands() -> list[str]:
    """Return the lines of code blocks that CI runs."""
    pages = [(REPOSITORY / page).read_text() for page in PAGES]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"<!-- runs in CI -->\n```sh\n(.*?)```", page, re.DOTALL)
    ]
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines()))


def test_there_are_commands_for_every_floor_and_readme_is_short() -> None:
    words = {line.split()[0] for line in printed_commands()}
    assert words >= {"data_prep", "pretrain", "finetune", "analysis", "torchrun", "accelerate"}
    assert len((REPOSITORY / "README.md").read_text().split()) <= 500


def add_pictures(place: Path) -> None:
    """Add files as in users' folders: other formats, nested folders, damaged images, other
    files."""
    folder, image = min(place.iterdir()), picture(seed=1, width=90)
    nested = {
        f"{folder.name}/trip/nested.jpeg": encoded(image),
        f"{folder.name}/good.png": encoded(image, "PNG"),
    }
    broken = {
        f"{folder.name}/cut.jpg": encoded(image)[:-300],
        f"{folder.name}/notes.txt": b"not mine",
    }
    write_files(place, {f"{folder.name}/good.webp": webp(image), **nested, **broken})


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_commands_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command of each program, and launchers' commands, start in a shell. Other commands that
    import torch are forked (see forked.py) with a shell's words."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "tests/analysis/points"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(REPOSITORY / name)
    text = (REPOSITORY / "docs/training.md").read_text()
    for name, code in re.findall(r"<!-- (\S+) in CI -->\n```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    printed, as_typed = (
        printed_commands(),
        {"pretrain train", "finetune evaluate", "analysis report"},
    )
    for number, line in enumerate(printed):
        if line.startswith("pretrain recommend"):
            add_pictures(tmp_path / "data/shapes-images/train")
        words, verb = shlex.split(line), " ".join(line.split()[:2])
        if words[0] in ("pretrain", "finetune", "analysis") and verb not in as_typed:
            output = tmp_path / f"output-{number}"
            (code,) = wait(
                [
                    begin(
                        "tests.training:main",
                        words[0],
                        words[1:],
                        environment=environment,
                        output=output,
                    )
                ],
                timeout_s=400,
            )
            said = output.read_text()
        else:
            done = subprocess.run(
                ["/bin/sh", "-c", line],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
            )
            code, said = done.returncode, f"{done.stdout}\n{done.stderr}"
            as_typed.discard(verb)
        assert code == 0, f"$ {line}\n{said}"
        if line.startswith(
            ("pretrain recommend", "pretrain train runs/mine")
        ):  # README's next command is the printed one
            (is_next,) = re.findall(r"^ *next:? +(\w.*)$", said, re.MULTILINE)
            assert re.match(re.escape(is_next).replace("IMAGES", r"\S+"), printed[number + 1]), (
                f"$ {line}\n{said}"
            )
    assert not as_typed
    rejected = [
        json.loads(line)
        for line in (tmp_path / "data/mine/rejected.jsonl").read_text().splitlines()
    ]
    reasons = [(reject["path"].rsplit("/", 1)[1], reject["reason"]) for reject in rejected]
    assert reasons == [("cut.jpg", "truncated")]
    assert load_manifest(tmp_path / "data/mine").num_left_out == {".txt files": 1}
    stored = [
        json.loads(path)
        for file in (tmp_path / "data/mine").glob("train-*.paths")
        for path in file.read_text().splitlines()
    ]
    assert {path.rsplit("/", 1)[1] for path in stored} > {"good.webp", "good.png", "nested.jpeg"}
    for left in (
        "data/shapes/manifest.json",
        "predictions.csv",
        "runs/first-tuned/result.json",
        "exports/first-tuned/model.onnx",
        "runs/report.png",
        "runs/tables.png",
        "runs/mlflow.db",
    ):
        assert (tmp_path / left).exists(), left
    kept = {
        "configs",
        "tests",
        "my_models.py",
        *(path.name for path in tmp_path.glob("output-*")),
    }  # files of this test
    assert (
        tracked_by_git(
            each.name + "/" * each.is_dir() for each in tmp_path.iterdir() if each.name not in kept
        )
        == []
    )


def tracked_by_git(outputs: Iterable[str]) -> list[str]:
    """Return the paths that `git status` would show in a checkout."""
    words = ["git", "-C", str(REPOSITORY), "check-ignore", "--no-index", "--stdin"]
    outputs = list(outputs)
    done = subprocess.run(
        words, input="\n".join(outputs), capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return sorted({*outputs} - {*done.stdout.splitlines()})


def test_git_ignores_the_outputs_of_all_printed_commands() -> None:
    text = "".join(page.read_text() for page in (REPOSITORY / "README.md", *DOCS))
    lines = "\n".join(
        re.findall(r"^(?:data_prep|pretrain|finetune|analysis) .*", text, re.MULTILINE)
    )
    words = re.findall(r"(?:--out|--features|run_dir=|export \S+) ?([\w./-]+)(?!\S*://)", lines)
    outputs = {word for word in words if not word.startswith("/") and ("." in word or "/" in word)}
    assert {"predictions.csv", "exports/mine", "runs/mine-probe"} <= outputs
    assert (
        tracked_by_git(
            [*outputs, "duplicates.jsonl", "mlflow.db", "mlruns/0", "runs/mlflow.db", "model.onnx"]
        )
        == []
    )


def test_links_between_pages_lead_somewhere() -> None:
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS]
    for page in pages:
        links = [
            link
            for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
            if "://" not in link
        ]
        root = REPOSITORY / "docs" if page in DOCS else REPOSITORY  # the site has no other files
        found = [(page.parent / link).resolve() for link in links]
        assert [each for each in found if not each.exists() or root not in each.parents] == []


def test_each_code_block_of_the_site_runs_in_ci_or_says_why_not() -> None:
    mark = re.compile(r"<!-- (\S+ in CI|not run: \S.*) -->")
    unmarked = []
    for page in DOCS:
        before = ""
        for line in map(str.strip, page.read_text().splitlines()):
            if line in ("```sh", "```python") and not mark.fullmatch(before):
                unmarked.append(page.name)
            before = line
    assert {*unmarked} <= UNMARKED


def test_the_pages_of_the_site_have_at_most_20_000_words() -> None:
    texts = [text for page in DOCS for _, text, _ in texts_of_markdown(page.read_text())]
    assert len(" ".join(texts).split()) <= 20_000


def test_an_address_that_a_page_loads_is_found_and_a_link_is_not(tmp_path: Path) -> None:
    page, style = tmp_path / "page.html", tmp_path / "style.css"
    page.write_text(
        '<a href="https://a.example"></a><link rel="canonical" href="https://b.example"><img'
        ' src="x.png"><link rel="stylesheet" href="//c.example/x.css"><script src="https://d.example">'
    )
    style.write_text("@font-face {src: url('https://e.example/x.woff')} a {background: url(x.png)}")
    assert remote_loads(page) == ["//c.example/x.css", "https://d.example"]
    assert remote_loads(style) == ["https://e.example/x.woff"]


@pytest.mark.processes
def test_pages_are_written_without_the_packages_of_the_tests() -> None:
    """`make settings` runs in an environment of `sh install.sh`, without pytest and execnet."""
    program = "import sys; sys.modules |= dict.fromkeys(('execnet', 'pytest'));"
    program += "import tests.papers_page, tests.reference_pages"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


@pytest.mark.processes
def test_no_library_sends_usage_data() -> None:
    """ONNX Runtime starts a thread that sends; a fork of the tests' processes during its lookup of
    a host once hung."""
    code = """
import os, data_prep, mlflow
from mlflow.telemetry import get_telemetry_client
threads = len(os.listdir("/proc/self/task"))
import onnxruntime
print(get_telemetry_client(), len(os.listdir("/proc/self/task")) - threads)
"""
    chosen = {"PYTEST_CURRENT_TEST", "CI", "DO_NOT_TRACK", "ORT_DISABLE_TELEMETRY"}
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "None 0\n"


def test_paths_in_code_blocks_of_the_site_exist() -> None:
    path = re.compile(r"(?<![\w/.-])(?:configs|cluster|docs|benchmarks|tests)/[\w./-]*\w")
    missing = {
        each: page.name
        for page in DOCS
        for block in re.findall(
            r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for each in path.findall(block)
        if not (REPOSITORY / each).exists()
    }
    assert {*missing.values()} <= UNMARKED, missing


def test_exactly_one_pil_is_installed_and_it_is_the_fast_one_where_it_can_be_built() -> None:
    found = []
    for name in ("pillow", "pillow-simd"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    assert len(found) == 1
    name, number = found[0]
    log = Path(sys.prefix) / "pillow.lock"  # `make bounds` does not write this file
    wanted = log.read_text().split("==")[0] if log.exists() else name
    assert name == wanted and number == PIL.__version__
    if name == "pillow":
        pytest.skip(
            "plain Pillow was chosen, or install.sh could not build Pillow-SIMD and named the"
            " reason"
        )
    assert ".post" in PIL.__version__


def test_the_locks_are_exact_hashed_and_name_no_registry() -> None:
    packages = []
    for name in ("requirements.lock", "requirements-dev.lock"):
        text = (REPOSITORY / name).read_text()
        packages.append(re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", text, re.MULTILINE))
        blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
        assert len(blocks) == len(packages[-1])
        assert all("--hash=sha256:" in block for block in blocks)
        assert "://" not in text and "index-url" not in text
    users, extras = packages
    assert len(users) > 100 and {("torch", "2.11.0"), ("torchvision", "0.26.0")} <= {*users}
    tools = {"pytest", "ruff", "mypy", "moto", "wandb"}
    assert tools <= {name for name, _ in extras}
    assert not {name for name, _ in extras} & {name for name, _ in users}


def test_the_nightly_workflow_tests_both_ends_of_the_bounds() -> None:
    text = (REPOSITORY / ".github/workflows/nightly.yml").read_text()
    resolutions = []
    for target in re.findall(r"target: ([\w-]+)", text):
        done = subprocess.run(
            ["make", "--dry-run", target],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        resolutions += re.findall(r"--resolution ([\w-]+)", done.stdout)
        assert "pytest -q tests/distributed" in done.stdout
    assert resolutions == ["lowest-direct", "highest"]


def test_a_new_clone_is_installed_once() -> None:
    command = ["make", "--dry-run", "--assume-new=install.sh", ".venv/.dev"]
    printed = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    assert re.findall("sh install.sh.*", printed) == ["sh install.sh dev"]


@pytest.mark.slow
def test_long_files_long_functions_and_full_folders_have_a_reason() -> None:
    """Files over 16,000 non-whitespace characters and functions over 3,600 have a docstring
    sentence with "long because". MANY_FILES lists folders of more than 12 files."""
    found = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            text, name = path.read_text(), path.relative_to(REPOSITORY).as_posix()
            module = ast.parse(text)
            functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
            for node, limit in [(module, 16_000), *((each, 3_600) for each in functions)]:
                source = text if node is module else ast.get_source_segment(text, node) or ""
                size = num_characters(source)
                if size > limit and "long because" not in (ast.get_docstring(node) or "").lower():
                    found.append(f"{name}: {getattr(node, 'name', 'file')}: {size} characters")
        for folder in [REPOSITORY / package, *sorted((REPOSITORY / package).rglob("*/"))]:
            files = [
                path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"
            ]
            name = folder.relative_to(REPOSITORY).as_posix()
            if len(files) > 12 and name not in MANY_FILES and "__pycache__" not in name:
                found.append(f"{name}: {len(files)} files")
    assert found == []
