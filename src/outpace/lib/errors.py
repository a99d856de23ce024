"""Errors a user can act on. Each message names the field, the value and the remedy."""


class OutpaceError(Exception):
    """Base of every error that Outpace raises on purpose."""


class InvalidRequest(OutpaceError, ValueError):
    """A request cannot be served as asked: a bad parameter, an empty prompt, a prompt that does not fit."""


class NoDrafter(InvalidRequest):
    """A method needs a drafter of a kind that was neither named nor ships for the target."""


class ModelError(OutpaceError):
    """A model cannot be found, read or trusted."""


class UnsupportedModel(ModelError):
    """The model was read, but its architecture cannot be decoded losslessly by this engine."""


class PerformanceWarning(UserWarning):
    """Outpace works, but much slower than it could on this machine. The message names the cause and the remedy."""


class StateLost(OutpaceError, RuntimeError):
    """An exception cut a step short, and a request's state could not be restored. Send the request again."""


class NonFiniteLogits(OutpaceError, ArithmeticError):
    """The target produced NaN or infinite logits, so no token can be chosen."""


class MethodError(OutpaceError, ValueError):
    """A method, usually of another package, breaks a rule of proposers, sources or trees."""


def first_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
