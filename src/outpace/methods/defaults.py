"""Which method is taken where none is named, and what the union drafts with where that is left open: one decision."""

from outpace.drafters.kinds import kinds
from outpace.drafters.method import said_of
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import WITHOUT_DRAFTER, MethodSpec, method, methods, parse_method
from outpace.methods.union import DRAFTS
from outpace.models.loading.shipped import Shipment


def default_method(named: str | None, found: Shipment, has_kernels: bool = False) -> str:
    """The method to take where none is named: that of the drafter that was named, or what is best with the drafters
    that ship for the target, else what needs none.

    Args:
        named: kind of the drafter that was named; None if none was.
        found: what ships for the target.
        has_kernels: the target's passes are one call to compiled kernels.
    """
    if named is not None:
        return kinds()[named].default_method
    if has_kernels and found.default_method is not None:
        drafter = parse_method(found.default_method).drafter
        if drafter is None or drafter in found.drafters:  # a wheel leaves large drafters out, until they are pulled
            return found.default_method
    nets = (kind for kind in kinds().values() if kind.net is not None and kind.name in found.drafters)
    return next((kind.default_method for kind in nets), WITHOUT_DRAFTER)


def with_draft(spec: MethodSpec, named: str | None, found: Shipment, has_kernels: bool = False) -> MethodSpec:
    """A method with its draft, which the union leaves to the drafters at hand: it is the default method's.

    Args:
        spec: with its options.
        named, found, has_kernels: as for `default_method`.

    Raises:
        InvalidRequest: the drafter that was named is of a kind that the union does not draft with, or an option does
            nothing with what was chosen.
    """
    if not spec.is_open:
        return spec
    default = default_method(named, found, has_kernels)
    kind = parse_method(default).drafter
    served = (kind, *kinds()[kind].serves) if kind is not None and kind in kinds() else (kind,)
    draft = next((draft for draft in DRAFTS if methods()[draft].drafter in served), None)
    if draft is None and named is not None:
        raise InvalidRequest(
            f"drafter: is {said_of(named)}, and method {str(spec)!r} drafts with {', '.join(DRAFTS)}: use this one "
            f"with method {default!r}"
        )
    return method(spec.name, **spec.options.model_dump(exclude_unset=True) | {"draft": draft or "none"})
