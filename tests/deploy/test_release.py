"""The workflows, the versions they test and the citation, against the project that they are for."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS: dict[str, dict[str, Any]] = {name: yaml.safe_load(text)["jobs"] for name, text in WORKFLOWS.items()}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_is_there(name: str) -> None:
    """Guards against a workflow that stops because a script or a target of make has another name now."""
    text = WORKFLOWS[name]
    targets = set(re.findall(r"\bmake ([a-z][\w-]*)", text))
    assert not [one for one in targets if f"\n{one}: " not in (ROOT / "Makefile").read_text()]
    assert not [one for one in re.findall(r"\b(?:scripts|constraints)/[\w./-]+", text) if not (ROOT / one).is_file()]


def test_every_version_that_is_claimed_is_tested() -> None:
    """Guards against a Python, or a lower bound, that the package or the README names and no job runs."""
    claimed = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python ::" in one}
    ran: set[str] = set()
    for job in JOBS["ci"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        ran |= {*matrix.get("python", []), *(row["python"] for row in matrix.get("include", []))}
    assert claimed == ran
    readme = (ROOT / "README.md").read_text()
    assert f"Python {min(claimed)} to {max(claimed)}" in readme
    assert PROJECT["requires-python"] == f">={min(claimed)}"
    for name in ("torch", "transformers"):
        (bound,) = (one.removeprefix(f"{name}>=") for one in PROJECT["dependencies"] if one.startswith(f"{name}>="))
        assert f"{name} {bound} or later" in readme


def test_a_release_waits_for_the_thorough_tests() -> None:
    """Guards against a release without the statistics of rejection sampling and most cases of every other test: only
    `make test-more` has them."""
    ran = [step.get("run", "").strip() for job in JOBS["ci"].values() for step in job["steps"]]
    assert "make test-more" in ran


def test_only_what_publishes_may_publish() -> None:
    """Guards against a job that gets more rights than its task needs, and an upload before all tests have passed."""
    for name, text in WORKFLOWS.items():
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        for job, about in JOBS[name].items():
            allowed = {"pypi": {"id-token"}, "github": {"contents"}, "pages": {"pages", "id-token"}}.get(job, set())
            assert about.get("permissions", {}).keys() == allowed, f"{name}: {job}"
    needs = {job: about.get("needs") for job, about in JOBS["release"].items()}
    assert needs == {"ci": None, "check": "ci", "pypi": "check", "github": "pypi", "pages": "pypi"}


def test_the_citation_names_the_papers() -> None:
    """Guards against a citation file that cannot be read, or one without the papers of the methods."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", PROJECT["license"])
    titles = " ".join(paper["title"] for paper in citation["references"])
    assert all(name in titles for name in ("Domino:", "DynaTree:", "Draft Less, Retrieve More"))
