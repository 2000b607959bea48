"""The keys that TFDS gives the examples of data sets whose keys are known without the data, and the splits by them."""

import functools

from vitlab.data.vtab.sources import SOURCES
from vitlab.data.vtab.tasks import TASKS, TRAIN, VAL, benchmark_order

KNOWN = ("cifar100", "svhn", "patch_camelyon", "eurosat", "resisc45", "clevr", "dsprites", "smallnorb")
EUROSAT = {
    "AnnualCrop": 3_000,
    "Forest": 3_000,
    "HerbaceousVegetation": 3_000,
    "Highway": 2_500,
    "Industrial": 2_500,
    "Pasture": 2_000,
    "PermanentCrop": 2_500,
    "Residential": 3_000,
    "River": 2_500,
    "SeaLake": 3_000,
}
RESISC45 = """
    airplane airport baseball_diamond basketball_court beach bridge chaparral church circular_farmland cloud
    commercial_area dense_residential desert forest freeway golf_course ground_track_field harbor industrial_area
    intersection island lake meadow medium_residential mobile_home_park mountain overpass palace parking_lot railway
    railway_station rectangular_farmland river roundabout runway sea_ice ship snowberg sparse_residential stadium
    storage_tank tennis_court terrace thermal_power_station wetland
"""


def known_keys(source: str, part: str) -> list[str]:
    """The keys of a TFDS split, for a set whose keys are known without its data."""
    count = SOURCES[source].sizes[part]
    if source == "clevr":
        return [f"CLEVR_{'val' if part == 'validation' else part}_{i:06d}.png" for i in range(count)]
    if source == "patch_camelyon":
        return [f"{'valid' if part == 'validation' else part}_{i}" for i in range(count)]
    if source == "eurosat":
        return [f"{kind}_{kind}_{i}.jpg" for kind, n in EUROSAT.items() for i in range(1, n + 1)]
    if source == "resisc45":
        return [f"{kind}_{kind}_{i:03d}.jpg" for kind in RESISC45.split() for i in range(1, 701)]
    return [str(i) for i in range(count)]


def computed_splits(source: str) -> dict[str, list[str]]:
    """The keys of "train800" and of "val200" in their order."""
    part, start = next(task.val for task in TASKS.values() if task.source == source)

    @functools.cache
    def ordered(part: str) -> list[str]:
        keys = known_keys(source, part)
        return [keys[i] for i in benchmark_order(keys, part)]

    def head(part: str, start: int, count: int) -> list[str]:
        return ordered(part)[start : start + count]

    return {"train800": head("train", 0, TRAIN), "val200": head(part, start, VAL)}
