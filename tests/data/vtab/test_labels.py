"""The labels of the structured tasks on rows whose answer is known, with every value on a boundary."""

import numpy as np
import pytest

from vitlab.data.vtab import labels


def up(value: float) -> float:
    """The next float32: the smallest step over a boundary."""
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def test_clevr_counts_from_three_objects() -> None:
    assert labels.clevr_count(np.arange(3, 11)).tolist() == list(range(8))
    assert (labels.CLEVR_COUNT[0], labels.CLEVR_COUNT[7]) == ("3 objects", "10 objects")


@pytest.mark.parametrize("count", [2, 11])
def test_another_count_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="objects less 3 are 0 to 7"):
        labels.clevr_count(np.array([5, count]))


def test_a_depth_on_a_threshold_is_in_the_lower_bin() -> None:
    depths = [0.1, 8.0, up(8.0), 8.5, up(8.5), 9.0, up(9.0), 9.5, up(9.5), 10.0, up(10.0), 99.0]
    assert labels.clevr_distance(np.array(depths)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert labels.CLEVR_DISTANCE[1] == "over 8 to 8.5"


def test_depths_are_compared_in_float32() -> None:
    assert labels.clevr_distance(np.array([8.0 + 1e-9])).tolist() == [0]  # in float64 it would be over 8


def test_kitti_bins_and_the_class_without_a_vehicle() -> None:
    metres = [-3.0, 0.0, 8.0, up(8.0), 20.0, up(20.0), 999.0, up(999.0), labels.NO_VEHICLE]
    assert labels.kitti_distance(np.array(metres)).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert labels.KITTI_DISTANCE[3] == "no vehicle"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_distances_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        labels.clevr_distance(np.array([9.0, value]))


def test_dsprites_takes_two_places_to_a_class() -> None:
    assert labels.dsprites_location(np.arange(32)).tolist() == [i for i in range(16) for _ in range(2)]
    with pytest.raises(ValueError, match="not 16"):
        labels.dsprites_location(np.array([32]))


def test_dsprites_orientations_are_divided_by_two_and_a_half() -> None:
    steps = np.arange(40)
    found = labels.dsprites_orientation(steps)
    assert found.tolist() == np.floor(steps / np.float32(2.5)).astype(int).tolist()
    assert found[[0, 2, 3, 4, 5, 37, 38, 39]].tolist() == [0, 0, 1, 1, 2, 14, 15, 15]
    with pytest.raises(ValueError, match="not 16"):
        labels.dsprites_orientation(np.array([40]))


def test_the_names_of_orientations_are_the_angles_of_their_class() -> None:
    degrees = np.linspace(0, 360, 40)
    found = labels.dsprites_orientation(np.arange(40))
    angles = [degrees[found == label] for label in range(16)]
    assert list(labels.DSPRITES_ORIENTATION) == [f"{a.min():.0f} to {a.max():.0f} degrees" for a in angles]


def test_smallnorb_azimuths_are_stored_doubled() -> None:
    assert labels.smallnorb_azimuth(np.arange(0, 36, 2, dtype=np.int32)).tolist() == list(range(18))
    assert labels.SMALLNORB_AZIMUTH[17] == "340 degrees"
    with pytest.raises(ValueError, match="even"):
        labels.smallnorb_azimuth(np.array([2, 3]))
    with pytest.raises(ValueError, match="not 18"):
        labels.smallnorb_azimuth(np.array([36]))


def test_smallnorb_elevations_are_labels_already() -> None:
    assert labels.smallnorb_elevation(np.arange(9)).tolist() == list(range(9))
    assert (labels.SMALLNORB_ELEVATION[0], labels.SMALLNORB_ELEVATION[8]) == ("30 degrees", "70 degrees")
    with pytest.raises(ValueError, match="not 9"):
        labels.smallnorb_elevation(np.array([9]))


def test_every_class_has_a_name_of_its_own() -> None:
    tables = {
        labels.CLEVR_COUNT: 8, labels.CLEVR_DISTANCE: 6, labels.DMLAB: 6, labels.KITTI_DISTANCE: 4,
        labels.DSPRITES_LOCATION: 16, labels.DSPRITES_ORIENTATION: 16, labels.SMALLNORB_AZIMUTH: 18,
        labels.SMALLNORB_ELEVATION: 9,
    }  # fmt: skip
    assert all(len(set(names)) == count for names, count in tables.items())
