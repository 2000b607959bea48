"""A clear word on arrays that do not fit a model."""

from collections.abc import Mapping

from vitlab.errors import UserError


def check_shapes(what: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError that lists every array which is missing, unknown or of another shape."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    differ = [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    parts = (("missing", missing), ("unknown", unknown), ("of another shape", differ))
    complaints = [f"{len(names)} {kind}: {some(names)}" for kind, names in parts if names]
    if complaints:
        raise UserError(f"{what}, but the arrays do not fit ({'; '.join(complaints)}).")


def some(names: list[str], most: int = 12) -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
