"""Makes the environment of `make test-vllm`: vLLM's, as `make peers` has it, with this checkout and its tests' needs.

python scripts/vllm_environment.py; run from the root of the repository. An error is printed in one line.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.contenders import PEERS
from benchmarks.peers.environments import VERSIONS, PeerMissing, prepare

TESTS_NEED = ("pytest", "pytest-timeout", "scipy", "httpx", "prometheus-client")


def main() -> None:
    """Make the environment if it is not there, and install the checkout in it."""
    vllm = PEERS["vllm"]
    try:
        python = prepare("vllm", replace(vllm, packages=(*vllm.packages, *TESTS_NEED)), Path("build"))
    except PeerMissing as error:
        sys.exit(str(error))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(VERSIONS / "vllm.txt"), "--editable", "."], check=True)


if __name__ == "__main__":
    main()
