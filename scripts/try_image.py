"""Runs the build steps of deploy/Containerfile in a folder, without a daemon, and states the image's size.

python scripts/try_image.py [--model FILE]; run as root from the root of the repository, after `make wheels`. It needs
debootstrap, and the same Debian release as the image's. With a model it also answers a prompt in the folder.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

FILE = Path("deploy/Containerfile")
ROOT = Path("build/image/root")
MOST_BYTES = 1_200_000_000
MOUNT = re.compile(r"--mount=type=bind,source=(\S+),target=(\S+)\s+")
GIVEN = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {"PIP_RETRIES": "0"}
"""This machine's settings for pip, with the places of its packages. Retries are off: an index may be unreachable."""
PLACES = {
    name: f"/mnt/{name.lower()}" for name, value in GIVEN.items() if value.startswith("/") and Path(value).exists()
}
"""Mount points of the files and folders in these settings."""


def main() -> None:
    """Build, measure and try; exit status 1 if the image is too large or does not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    model: Path | None = parser.parse_args().model
    if shutil.which("debootstrap") is None:
        sys.exit("debootstrap is missing: apt-get install debootstrap")
    steps = instructions(FILE.read_text())
    release = next(rest for word, rest in steps if word == "FROM").removeprefix("debian:").removesuffix("-slim")
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    subprocess.run(["debootstrap", "--variant=minbase", release, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    for path in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt/archives"):  # as the slim image
        shutil.rmtree(ROOT / path, ignore_errors=True)
    shutil.copy("/etc/resolv.conf", ROOT / "etc" / "resolv.conf")
    variables, user = {"PATH": os.environ["PATH"]}, "root"
    for word, rest in steps:
        if word == "RUN":
            run(MOUNT.sub("", rest), variables, user, dict(MOUNT.findall(rest)))
        elif word == "ENV":
            variables |= dict(one.split("=", 1) for one in shlex.split(rest))
        elif word == "USER":
            user = rest
    shutil.rmtree(ROOT / "var/cache/apt")  # the base image's settings keep apt from filling it
    size = int(subprocess.check_output(["du", "--summarize", "--block-size=1", str(ROOT)], text=True).split()[0])
    print(f"{size / 1e6:.0f} MB of at most {MOST_BYTES / 1e6:.0f}")
    run("outpace --version && outpace serve --help > /dev/null", variables, user, {})
    if model is not None:
        command = "outpace generate /mnt/model.gguf 'Why is the sky blue?' --max-new-tokens 64"
        run(command, variables, user, {str(model.resolve()): "/mnt/model.gguf"})
    if size > MOST_BYTES:
        sys.exit("the image is too large")


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Containerfile and their arguments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines() if line.strip()]


def run(command: str, variables: dict[str, str], user: str, mounts: dict[str, str]) -> None:
    """Run a command in the image's folder as one of its users, with folders and files of this machine mounted."""
    script = [f"mount -t proc proc {ROOT}/proc", f"mount --bind /dev {ROOT}/dev"]
    for source, target in (*mounts.items(), *((GIVEN[name], place) for name, place in PLACES.items())):
        place = ROOT / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(source).is_dir():
            place.mkdir(exist_ok=True)
        elif not place.exists():
            place.touch()
        script.append(f"mount --bind {shlex.quote(source)} {shlex.quote(str(place))}")
    script.append(f"exec {shutil.which('chroot')} --userspec={user} {ROOT} /bin/sh -ec {shlex.quote(command)}")
    subprocess.run(["unshare", "--mount", "sh", "-ec", "\n".join(script)], check=True, env=GIVEN | PLACES | variables)


if __name__ == "__main__":
    main()
