"""The labels of VTAB's structured tasks, from the annotations of their sets.

All are pure: arrays of annotations in, int64 labels [N] out. Bins are closed above: a value on a threshold belongs
to the lower bin. Depths are compared in float32, as the benchmark stores them.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int, Int64

from vitlab.errors import UserError

CLEVR_COUNT = tuple(f"{n} objects" for n in range(3, 11))
CLEVR_DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)
CLEVR_DISTANCE = (
    "up to 8",
    *(f"over {low:g} to {high:g}" for low, high in itertools.pairwise(CLEVR_DEPTHS)),
    "over 10",
)
DMLAB = tuple(f"{where} {what}" for what in ("reward", "penalty") for where in ("close", "far", "very far"))
DSPRITES_LOCATION = tuple(f"x {2 * i} or {2 * i + 1} of 31" for i in range(16))
DSPRITES_ORIENTATION = tuple(  # 40 orientations from 0 to 360 degrees, by turns three and two to a class
    f"{np.ceil(2.5 * i) * 360 / 39:.0f} to {(np.ceil(2.5 * i + 2.5) - 1) * 360 / 39:.0f} degrees" for i in range(16)
)
KITTI_METRES = (8.0, 20.0)
KITTI_DISTANCE = ("vehicle up to 8 m", "vehicle over 8 to 20 m", "vehicle over 20 m", "no vehicle")
KITTI_VEHICLES = ("Car", "Van", "Truck")
NO_VEHICLE = 1000.0
"""What stands for the distance, in metres, where there is no vehicle; anything over 999 is taken for it."""
SMALLNORB_AZIMUTH = tuple(f"{20 * i} degrees" for i in range(18))
SMALLNORB_ELEVATION = tuple(f"{30 + 5 * i} degrees" for i in range(9))


def clevr_count(objects: Int[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the number of objects in the image: 3 to 10."""
    return _within(objects - 3, CLEVR_COUNT, "numbers of objects less 3")


def clevr_distance(depths: Float[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the depth of the nearest object: the least third pixel coordinate, in the scene's units."""
    return _bins(depths, CLEVR_DEPTHS)


def kitti_distance(metres: Float[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the least z of the cars, vans and trucks, in metres before the camera; `NO_VEHICLE` where there is none."""
    return _bins(metres, (*KITTI_METRES, NO_VEHICLE - 1))


def dsprites_location(x: Int[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the place from left to right, 0 to 31: two to a class."""
    return _within(x // 2, DSPRITES_LOCATION, "halved x positions")


def dsprites_orientation(orientation: Int[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the orientation, 0 to 39: floor(orientation / 2.5), three and two to a class by turns."""
    return _within(orientation * 2 // 5, DSPRITES_ORIENTATION, "orientations by 2.5")


def smallnorb_azimuth(azimuth: Int[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Of the azimuth as it is stored, 0, 2, ..., 34: tens of degrees."""
    if (azimuth % 2).any():
        raise UserError(f"azimuths are even numbers, not {azimuth[azimuth % 2 > 0][0]}")
    return _within(azimuth // 2, SMALLNORB_AZIMUTH, "halved azimuths")


def smallnorb_elevation(elevation: Int[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """The elevation as it is stored, 0 to 8."""
    return _within(elevation, SMALLNORB_ELEVATION, "elevations")


def _bins(values: np.ndarray, thresholds: tuple[float, ...]) -> np.ndarray:
    """How many thresholds lie below the value."""
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"distances are finite numbers, not {values[~np.isfinite(values)][0]}")
    return np.searchsorted(np.array(thresholds, np.float32), values, side="left").astype(np.int64)


def _within(labels: np.ndarray, classes: tuple[str, ...], what: str) -> np.ndarray:
    labels = labels.astype(np.int64)
    if strange := sorted(set(labels.tolist()) - set(range(len(classes)))):
        raise UserError(f"{what} are 0 to {len(classes) - 1}, not {strange[0]}")
    return labels
