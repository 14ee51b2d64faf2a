"""What a user gets: one top-level name, all files behind the links, HF's `kernels` left alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("kernels", "recipes", "evals")

# Planted in the copy that gets built, so that each kind of file is there whatever the checkout has.
PLANTED = {
    "kernels/probe/__init__.py": "VALUE = 7\n",
    "recipes/probe.yaml": "family: probe\n",
    "evals/probe.py": "VALUE = 8\n",
    "evals/models/probe-model/model.safetensors": "weights",
    "evals/models/probe-model/config.json": "{}",
    "evals/models/probe-model/tokenizer.json": "{}",
    "evals/models/probe-model/README.md": "# card\n",
    "evals/tasks/probe/data.jsonl": "{}\n",
    "evals/suites/probe.yaml": "tasks: []\n",
    "evals/results/RESULTS.md": "not shipped\n",
    "evals/results/probe/run.json": "{}",
    "replayssm_quant/probe_door.py": (
        "import importlib.util\n"
        "from replayssm_quant._paths import drop_checkout\n"
        "print(importlib.util.find_spec('kernels') is not None)\n"
        "drop_checkout()\n"
        "print(importlib.util.find_spec('kernels') is not None)\n"
        "import replayssm_quant.evals.probe, replayssm_quant.kernels.probe\n"
        "print(replayssm_quant.kernels.probe.VALUE + replayssm_quant.evals.probe.VALUE)\n"
    ),
}


def run(*args: str, cwd: Path, **env: str) -> str:
    """Output of a command; its standard error is in the failure message."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(args, cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{args} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def shipped_files(tree: Path) -> set[str]:
    """Names under `replayssm_quant/` that a wheel of this tree must hold: all but the results."""
    found: set[str] = set()
    for top in ("replayssm_quant", *LINKS):
        prefix = "" if top == "replayssm_quant" else "replayssm_quant/"
        for path in (tree / top).rglob("*"):  # rglob does not enter linked folders
            name = path.relative_to(tree).as_posix()
            if (
                path.is_symlink()
                or path.is_dir()
                or "__pycache__" in path.parts
                or name.startswith("evals/results/")
            ):
                continue
            found.add(prefix + name)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links kept, with the planted files."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    for name, text in PLANTED.items():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive as an installer does it, without the network."""
    work = tmp_path_factory.mktemp("build")
    build = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", build, "build_sdist", str(work), cwd=tree)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work / "src", filter="data")
    (source,) = (work / "src").iterdir()
    run(sys.executable, "-c", build, "build_wheel", str(work), cwd=source)
    (built,) = work.glob("*.whl")
    return built


def test_wheel_holds_one_name_and_every_file_but_the_results(tree: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    assert {n.split("/")[0] for n in names - info} == {"replayssm_quant"}
    assert names - info == shipped_files(tree)
    assert any(n.endswith("/licenses/LICENSE") for n in info)


def test_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import replayssm_quant, replayssm_quant.kernels.probe, replayssm_quant.evals.probe\n"
        "from importlib.resources import files\n"
        "print(replayssm_quant.__file__)\n"
        "print((files('replayssm_quant') / 'recipes' / 'probe.yaml').read_text())"
    )
    # -S: without site-packages, where this checkout may be installed as well
    out = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert out.splitlines() == [
        str(tmp_path / "site" / "replayssm_quant" / "__init__.py"),
        "family: probe",
    ]


def test_module_run_from_the_root_hides_the_bare_folders(tree: Path) -> None:
    # The first line shows the trap: the folder is importable under Hugging Face's name.
    out = run(sys.executable, "-S", "-m", "replayssm_quant.probe_door", cwd=tree)
    assert out.splitlines() == ["True", "False", "15"]


def test_transformers_sees_no_kernels_package_in_the_checkout() -> None:
    code = (
        "import importlib.metadata as m\n"
        "from replayssm_quant._paths import drop_checkout\n"
        "drop_checkout()\n"
        "from transformers.utils import is_kernels_available\n"
        "installed = any(d.metadata['Name'] == 'kernels' for d in m.distributions())\n"
        "print(is_kernels_available() == installed)"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT) == "True"


def test_import_from_the_root_is_light() -> None:
    code = (
        "import sys, replayssm_quant\n"
        "print(replayssm_quant.__file__)\n"
        "print([m for m in ('numpy', 'torch', 'transformers', 'triton') if m in sys.modules])"
    )
    out = run(sys.executable, "-c", code, cwd=ROOT)
    assert out.splitlines() == [str(ROOT / "replayssm_quant" / "__init__.py"), "[]"]


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_the_folders_are_no_packages(name: str) -> None:
    assert os.readlink(ROOT / "replayssm_quant" / name) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()


def test_git_keeps_the_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    paths = [f"replayssm_quant/{name}" for name in LINKS]
    listed = run("git", "ls-files", "-s", "--", *paths, cwd=ROOT)
    assert [line.split()[0] for line in listed.splitlines()] == ["120000"] * 3
