"""The versions of vLLM that this plugin was tested with."""

from contextlib import suppress

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from outpace.lib.errors import ModelError

TESTED = SpecifierSet(">=0.32,<0.34")
"""0.32 was run on a CPU. For 0.33, which has no CPU wheel, only the code that this plugin subclasses, replaces or calls
was compared with 0.32's."""


def installed_version() -> str:
    """The installed version of vLLM."""
    try:
        import vllm
    except ImportError as error:
        raise ModelError(f"vLLM cannot be imported ({error}); install it: pip install 'outpace[vllm]'") from error
    return str(vllm.__version__)


def refusal(version: str) -> str | None:
    """Why this plugin does not work with a version of vLLM; None if it does."""
    with suppress(InvalidVersion):  # "dev", of a checkout without tags
        if TESTED.contains(Version(version), prereleases=True):
            return None
    return (
        f"vLLM {version} is not among the versions this plugin was tested with ({TESTED}); install one of them, "
        "or a newer outpace"
    )
