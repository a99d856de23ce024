"""An environment of its own for every peer that needs one: made once, from pinned versions."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.contenders import Peer
from outpace.kernels.build import COMPILERS
from outpace.lib.errors import OutpaceError

FOLDER, VERSIONS = Path("build/peers"), Path("constraints/peers")
"""The folders of environments and of pinned versions, from the root of the repository."""


class PeerMissing(OutpaceError):
    """A peer cannot run here; the message has the reason."""


def prepare(name: str, peer: Peer, folder: Path = FOLDER, constraints: Path = VERSIONS) -> Path:
    """The Python of a peer's environment, which is made if it is missing or its packages have changed.

    Args:
        name: of the peer.
        peer: what it needs.
        folder: folder of the environments; each is in a folder with the peer's name.
        constraints: a folder with `NAME.txt`, the versions of every package.

    Raises:
        PeerMissing: it cannot be installed.
    """
    if not peer.packages:
        return Path(sys.executable)
    file = constraints / f"{name}.txt"
    if not file.is_file():
        raise PeerMissing(f"{name}: no pinned versions in {file}; run from the root of the repository")
    home, python = folder / name / "env", folder / name / "env" / "bin" / "python"
    record = folder / name / "installed.txt"
    # The flags are included: otherwise programs built with other flags would be reused.
    parts = (*peer.packages, *peer.unwanted, *peer.flags, *peer.programs)
    made_of = "\n".join((file.read_text(encoding="utf-8"), *parts))
    if python.is_file() and record.is_file() and record.read_text(encoding="utf-8") == made_of:
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", "--without-pip", str(home)])
    pip = [sys.executable, "-m", "pip", "--python", str(python)]  # our pip installs into the peer's environment
    _run(name, [*pip, "install", "--quiet", "--constraint", str(file), *peer.packages])
    if peer.unwanted:
        _run(name, [*pip, "uninstall", "--quiet", "--yes", *peer.unwanted])
    if peer.programs:
        _compile(name, peer, folder / name / "source", file, python.parent)
    record.write_text(made_of, encoding="utf-8")
    return python


def _compile(name: str, peer: Peer, folder: Path, versions: Path, goal: Path) -> None:
    """Compile a peer's programs for this machine from the source that comes in its sdist, and copy them to `goal`.

    A later call continues an interrupted one.
    """
    if not any(map(shutil.which, COMPILERS)):
        raise PeerMissing(f"{name}: no C++ compiler on the PATH ({', '.join(COMPILERS)}); install one, such as g++")
    pinned = re.search(rf"^{peer.sdist}==(\S+)", versions.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None, f"{versions}: no {peer.sdist}"
    unpacked = folder / f"{peer.sdist}-{pinned[1]}"
    if not unpacked.is_dir():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", peer.sdist]
        _run(name, [*fetch, "--dest", str(folder), f"{peer.sdist}=={pinned[1]}"])
        partly = folder / "partly"
        shutil.rmtree(partly, ignore_errors=True)
        with tarfile.open(f"{unpacked}.tar.gz") as archive:
            archive.extractall(partly, filter="data")
        (partly / unpacked.name).rename(unpacked)
    tree, made, tools = unpacked / peer.tree, unpacked / "made", os.pathsep.join((str(goal), os.environ["PATH"]))
    flags = [f"-D{flag}" for flag in ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", *peer.flags)]
    cmake = str(goal / "cmake")
    _run(name, [cmake, "-S", str(tree), "-B", str(made), "-G", "Ninja", *flags], PATH=tools)
    cores = str(os.cpu_count() or 1)
    _run(name, [cmake, "--build", str(made), "--parallel", cores, "--target", *peer.programs], PATH=tools)
    for program in peer.programs:
        shutil.copy2(made / "bin" / program, goal / program)


def _run(name: str, command: list[str], **variables: str) -> None:
    """Run a step of an installation at the lowest priority."""
    polite = ["nice", "-n", "19"] if shutil.which("nice") else []
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    result = subprocess.run([*polite, *command], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        said = (result.stdout + result.stderr).splitlines()  # ninja prints the compilers' messages on standard output
        lines = [line.strip() for line in said if line.strip() and "WARNING" not in line]
        errors = [line for line in lines if "rror" in line] or lines
        raise PeerMissing(f"{name}: cannot be installed: {' '.join(errors[-2:]) or 'no reason given'}")
