import pytest

from vitlab.weights.shapes import check_shapes, some


def test_shapes_that_fit_say_nothing() -> None:
    check_shapes("x", {"a": (1, 2), "b": ()}, {"b": (), "a": (1, 2)})


def test_shapes_that_do_not_are_listed() -> None:
    with pytest.raises(ValueError) as caught:
        check_shapes("what", {"a": (1,), "b": (2,), "c": (3,)}, {"a": (1,), "b": (9,), "d": (4,)})
    assert str(caught.value) == (
        "what, but the arrays do not fit (1 missing: c; 1 unknown: d; "
        "1 of another shape: b has shape (9,) instead of (2,))."
    )


def test_many_names_are_cut_short() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some([str(i) for i in range(15)], most=3) == "0, 1, 2 and 12 more"
