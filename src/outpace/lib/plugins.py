"""Loads methods, shapes and drafters that other packages register under an entry point group."""

from importlib.metadata import entry_points
from typing import TypeVar
from warnings import warn

T = TypeVar("T")


def plugins(group: str, kind: type[T], taken: tuple[str, ...]) -> dict[str, T]:
    """The objects that installed packages name under a group, by their names.

    An entry is left out with a warning if its package fails to import, it is no `kind`, or its name is taken or differs
    from the object's: it must not stop others.
    """
    found: dict[str, T] = {}
    for entry in entry_points(group=group):
        package = entry.dist.name if entry.dist is not None else entry.value
        complaint = None
        try:
            loaded = entry.load()
        except Exception as error:  # another package's module may raise anything
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
