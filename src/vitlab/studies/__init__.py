"""Sec. 4.3-4.4, App. D: the paper's comparisons of many runs.

`STUDIES` are the names that `vitlab study` accepts. Nothing here imports torch.
"""

from vitlab.studies.axial import AXIAL
from vitlab.studies.data_size import DATA_SIZE
from vitlab.studies.head import HEAD
from vitlab.studies.masking import MASKING
from vitlab.studies.optimizer import OPTIMIZER
from vitlab.studies.positions import POSITIONS
from vitlab.studies.regularization import REGULARIZATION
from vitlab.studies.resolution import RESOLUTION
from vitlab.studies.scaling import SCALING
from vitlab.studies.shape import SHAPE
from vitlab.studies.spec import Study

_ALL = (DATA_SIZE, REGULARIZATION, SCALING, RESOLUTION, MASKING, OPTIMIZER, SHAPE, HEAD, POSITIONS, AXIAL)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
"""In the paper's order."""
