"""What pyproject.toml cannot say: what a wheel has beyond `src/`.

Trained drafters lie in `drafters/` here, and in `outpace/shipped/` of a wheel. A wheel for one platform has compiled
kernels too: OUTPACE_LIBRARIES is their folder, of scripts/build_kernels.py, and its name the platform's.
"""

import os
from pathlib import Path
from shutil import copyfile, copytree, rmtree

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SHIPPED = ("README.md", "*/target.json", "*/transitions/*", "smollm2-135m/*/*")
"""Files in a wheel, as MANIFEST.in has them for a source archive. Drafters of larger models are too large for both:
`outpace models pull` fetches them."""


LIBRARIES = os.environ.get("OUTPACE_LIBRARIES", "")


class BuildWithFiles(build_py):
    """Copies drafters and kernels. An editable install finds drafters where they are, and stays one line in a .pth file
    that tools read."""

    def run(self) -> None:
        if not self.editable_mode:  # of an earlier build: kernels' names stand for all sources that are there
            rmtree(Path(self.build_lib, "outpace"), ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for file in (path for pattern in SHIPPED for path in Path("drafters").glob(pattern)):
            copied = Path(self.build_lib, "outpace", "shipped", *file.parts[1:])
            copied.parent.mkdir(parents=True, exist_ok=True)
            copyfile(file, copied)
        if LIBRARIES:
            copytree(LIBRARIES, Path(self.build_lib, "outpace", "kernels", "libraries"))


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of one platform: the kernels are no extension modules."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", Path(LIBRARIES).name) if LIBRARIES else super().get_tag()


class Outpace(Distribution):
    """Says that files differ by platform, where kernels are among them."""

    def has_ext_modules(self) -> bool:
        return bool(LIBRARIES)


setup(distclass=Outpace, cmdclass={"build_py": BuildWithFiles, "bdist_wheel": PlatformWheel})
