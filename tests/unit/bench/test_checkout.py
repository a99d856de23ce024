"""Which commit is this? Of a package that runs from its checkout, and of one that is installed in another's."""

import subprocess
from pathlib import Path

import pytest

from outpace.bench import environment


def test_an_installed_copy_is_of_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drafter whose provenance is the commit of its user's own repository."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), "add", "own.py"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "--quiet", "-m", "own"], check=True)
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    assert environment.git("rev-parse", "HEAD") is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "__init__.py"], check=True)
    assert len(environment.git("rev-parse", "HEAD") or "") == 40
    monkeypatch.setenv("PATH", "")
    assert environment.git("rev-parse", "HEAD") is None
