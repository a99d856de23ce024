"""An environment of its own for every peer that needs one: made once, from pinned versions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.contenders import Peer
from outpace.lib.errors import OutpaceError


class PeerMissing(OutpaceError):
    """A peer that cannot race here, with the reason."""


def prepare(name: str, peer: Peer, folder: Path, constraints: Path) -> Path:
    """The Python of a peer's environment, which is made if it is not there or its versions have changed.

    Args:
        name: of the peer.
        peer: what it needs.
        folder: where environments lie; each gets a folder of the peer's name.
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
    record, versions = folder / name / "installed.txt", file.read_text(encoding="utf-8")
    if python.is_file() and record.is_file() and record.read_text(encoding="utf-8") == versions:
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", "--without-pip", str(home)], {})
    pip = [sys.executable, "-m", "pip", "--python", str(python)]  # our own, for theirs
    install = [*pip, "install", "--quiet", "--constraint", str(file)]
    compiled = [f"--no-binary={','.join(peer.from_source)}"] if peer.from_source else []
    _run(name, [*install, *compiled, *peer.packages], peer.build)
    if peer.unwanted:
        _run(name, [*pip, "uninstall", "--quiet", "--yes", *peer.unwanted], {})
    record.write_text(versions, encoding="utf-8")
    return python


def _run(name: str, command: list[str], variables: dict[str, str]) -> None:
    """Run a step of an installation, giving way to everything else on the machine."""
    polite = ["nice", "-n", "19"] if shutil.which("nice") else []
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    result = subprocess.run([*polite, *command], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip() and "WARNING" not in line]
        errors = [line for line in lines if "rror" in line] or lines
        raise PeerMissing(f"{name}: cannot be installed: {' '.join(errors[-2:]) or 'no reason given'}")
