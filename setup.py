"""What pyproject.toml cannot say: trained drafters lie in `drafters/` here, and in `outpace/shipped/` of a wheel."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithDrafters(build_py):
    """Copies them. An editable install finds them where they are, and stays one line in a .pth file that tools read."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copytree("drafters", Path(self.build_lib, "outpace", "shipped"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithDrafters})
