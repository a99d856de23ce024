"""What other packages add under an entry point group: methods, shapes, drafters."""

from importlib.metadata import entry_points
from typing import TypeVar
from warnings import warn

T = TypeVar("T")


def plugins(group: str, kind: type[T], taken: tuple[str, ...]) -> dict[str, T]:
    """The objects that installed packages name under a group, by their names.

    A package that fails to import, or gives something else, or a name that is taken or not the object's own, is left
    out with a warning that names it: it must not keep others from running.
    """
    found: dict[str, T] = {}
    for entry in entry_points(group=group):
        package = entry.dist.name if entry.dist is not None else entry.value
        complaint = None
        try:
            loaded = entry.load()
        except Exception as error:  # whatever a stranger's module raises
            complaint = f"{type(error).__name__}: {error}"
        else:
            if not isinstance(loaded, kind):
                complaint = f"{entry.value} is a {type(loaded).__name__}, not a {kind.__name__}"
            elif (own := getattr(loaded, "name", entry.name)) != entry.name:  # a kind of drafter has one
                complaint = f"{entry.value} is named {own!r}; give the entry point the same name"
            elif entry.name in taken or entry.name in found:
                complaint = f"there is a {entry.name!r} already; choose another name"
            else:
                found[entry.name] = loaded
        if complaint is not None:
            warn(f"{group}: {entry.name!r} of package {package} is left out: {complaint}", stacklevel=2)
    return found
