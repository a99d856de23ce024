"""Methods that requests name: checked, of files of the server's owner only, and a bounded number of them."""

from threading import Lock

from outpace.api import Model
from outpace.core.protocols import Proposer
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import MethodLike, MethodSpec, name_of, parse_method

OF_FILES = ("corpus", "ngrams", "vocabulary", "warm")
"""Options that name files of the machine, which no stranger may have read."""


class MethodNames:
    """The methods of a server's requests.

    Args:
        model: whose default may do anything.
        limit: different methods that are kept, each with what it learned and the memory of its slots.
    """

    def __init__(self, model: Model, limit: int) -> None:
        self._model, self._limit = model, limit
        self._kept: dict[str, Proposer] = {}  # held, so that the model keeps all of them
        self._adding = Lock()

    @property
    def default(self) -> str:
        return name_of(self._model.method)

    def proposer(self, name: str | None) -> tuple[str, Proposer]:
        """A method's canonical name and its proposer, built at its first request.

        Raises:
            InvalidRequest: unknown, with a bad option, of files, or one too many.
        """
        if name is None or name == self.default:
            return self.default, self._model.proposer(self._model.method)
        spec = parse_method(name)
        default: MethodLike = self._model.method
        if spec == (parse_method(default) if isinstance(default, str) else default):
            return self.default, self._model.proposer(default)
        _check_files(name, spec)
        said = str(spec)
        with self._adding:
            if said not in self._kept:
                if len(self._kept) >= self._limit:
                    raise InvalidRequest(
                        f"method={name!r}: this server keeps {self._limit} methods and has them: use "
                        f"{', '.join(sorted(self._kept))}, or start it with a larger --max-methods"
                    )
                self._kept[said] = self._model.proposer(spec)
            return said, self._kept[said]


def _check_files(name: str, spec: MethodSpec) -> None:
    for option in OF_FILES:
        value = getattr(spec.options, option, None)
        is_no_file = value is None or (option == "vocabulary" and value == "all")
        if option in spec.options.model_fields_set and not is_no_file:
            raise InvalidRequest(
                f"method={name!r}: {option} names a file of the server; it can only be given when it is started"
            )
