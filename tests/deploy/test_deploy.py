"""What lies in deploy/, against the server that it is for."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import typer.main
import yaml
from prometheus_client import generate_latest

from outpace import cli
from outpace.models.loading.registry import BUILT_IN, InWheel
from outpace.serve.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "outpace.json").read_text())


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_dashboard_asks_for_metrics_that_the_server_has() -> None:
    """Guards against panels that stay empty because a name was misspelt or has changed."""
    page = generate_latest(Metrics("m", lambda: (0, 0, 0.0)).registry).decode()
    # Counters that have labels of their own have no line before their first count: the type is there.
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    there = {name + part for name, kind in types.items() for part in parts[kind]}
    asked = {name for panel in _panels() for one in panel["targets"] for name in re.findall(r"vllm:\w+", one["expr"])}
    asked |= set(re.findall(r"vllm:\w+", json.dumps(DASHBOARD["templating"])))
    assert len(asked) > 20
    assert asked <= there, asked - there


def test_the_dashboard_is_whole() -> None:
    """Guards against panels that lie on each other, share a number, or ask a source of somebody else's."""
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in _panels():
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${source}"
            assert target["expr"].count("(") == target["expr"].count(")")
            # Division by the counters of two models would otherwise find no partner, and show nothing.
            assert "$model" in target["expr"]


def _options(command: list[str]) -> dict[str, Any]:
    """What `outpace serve` understands by a command line."""
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    params: dict[str, Any] = serve.make_context("serve", command).params
    return params


def test_the_unit_starts_a_server_and_lets_it_drain() -> None:
    """Guards against options that do not exist any more, and a unit that kills before the server is done."""
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "outpace.service")
    service = unit["Service"]
    program, command, *rest = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("outpace", "serve")
    options = _options(rest)
    assert options["host"] == "127.0.0.1"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) >= options["drain_timeout"] + 10
    assert shlex.split(service["ExecStartPre"]) == [program, "models", "pull", options["model"]]


def test_the_image_starts_a_server() -> None:
    """Guards against an image that stops at its first line, that listens where nobody can reach it, or that is, as an
    environment of uv may be, without what its model is downloaded with."""
    text = (DEPLOY / "Containerfile").read_text()
    entry, command = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", text, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["outpace", "serve"]
    options = _options([*entry[2:], *command])
    assert (options["host"], options["port"]) == ("0.0.0.0", 8000)
    assert "USER outpace" in text
    assert "127.0.0.1:8000/ready" in text
    assert isinstance(BUILT_IN[options["model"]], InWheel)
    wanted = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(re.match(r"pip\b", one) for one in wanted)
    assert "uninstall" not in text


def test_no_proxy_is_asked_for_the_images_health(tmp_path: Path) -> None:
    """Guards against a server that counts as ill because docker handed a proxy's address to its container."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", "")
    (found,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    (tmp_path / "ready").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        check = [sys.executable, *json.loads(found.replace(":8000/", f":{server.server_port}/"))[1:]]
        variables = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        done = subprocess.run(check, env=variables, capture_output=True, text=True)
        server.shutdown()
    assert done.returncode == 0, done.stderr


def test_the_page_says_what_the_server_has() -> None:
    """Guards against a page on deployment that leaves out what is watched."""
    page = (DEPLOY.parent / "docs" / "deploying.md").read_text()
    assert not [path for path in ("/v1/models", "/health", "/ready", "/metrics") if path not in page]


def test_prometheus_collects_from_where_the_server_listens() -> None:
    """Guards against a configuration that Prometheus cannot read, or that asks another port."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
