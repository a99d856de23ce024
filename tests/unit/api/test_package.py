"""What a wheel and a source archive hold, by the build's own file lists."""

import subprocess
import sys
from pathlib import Path
from shutil import copyfile, copytree

ROOT = Path(__file__).parents[3]
LARGE = "qwen2.5-coder-1.5b"


def empty(source: str, copied: str) -> None:
    """Lists depend on names alone."""
    Path(copied).touch()


def test_packages_hold_no_large_drafter(tmp_path: Path) -> None:
    """Guards against a wheel of 160 MB, one without the drafters and transitions that `shipped_folder` finds, and one
    with sources that an earlier build left: names of compiled kernels stand for all that there are, so that none would
    be found."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        copyfile(ROOT / name, tmp_path / name)
    for name in ("src", "drafters"):
        copytree(ROOT / name, tmp_path / name, copy_function=empty)
    for name in ("lattice/config.json", "lattice/model.safetensors", "transitions/transitions.safetensors"):
        file = tmp_path / "drafters" / LARGE / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    stale = tmp_path / "built" / "outpace" / "kernels" / "cpp" / "deleted.h"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", ".", "build_py", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert not stale.exists()
    shipped = tmp_path / "built" / "outpace" / "shipped"
    wheel = {str(path.relative_to(shipped)) for path in shipped.rglob("*") if path.is_file()}
    listed = (tmp_path / "outpace.egg-info" / "SOURCES.txt").read_text().splitlines()
    archive = {name.removeprefix("drafters/") for name in listed if name.startswith("drafters/")}
    here = (path.relative_to(ROOT / "drafters") for path in (ROOT / "drafters").rglob("*") if path.is_file())
    drafters = {str(path) for path in here if path.parts[0] == "smollm2-135m"}
    assert len(drafters) > 20
    assert wheel == archive
    assert {name for name in wheel if name.startswith(LARGE)} == {
        f"{LARGE}/target.json",
        f"{LARGE}/transitions/transitions.safetensors",
    }
    assert wheel >= drafters | {"README.md"}
