"""What pyproject.toml cannot say: trained drafters lie in `drafters/` here, and in `outpace/shipped/` of a wheel."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("README.md", "*/target.json", "*/transitions/*", "smollm2-135m/*/*")
"""Files in a wheel, as MANIFEST.in has them for a source archive. Drafters of larger models are too large for both:
`outpace models pull` fetches them."""


class BuildWithDrafters(build_py):
    """Copies them. An editable install finds them where they are, and stays one line in a .pth file that tools read."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in (path for pattern in SHIPPED for path in Path("drafters").glob(pattern)):
            copied = Path(self.build_lib, "outpace", "shipped", *file.parts[1:])
            copied.parent.mkdir(parents=True, exist_ok=True)
            copyfile(file, copied)


setup(cmdclass={"build_py": BuildWithDrafters})
