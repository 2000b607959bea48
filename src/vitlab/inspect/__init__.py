"""Sec. 4.5, App. D.7-D.8: looking inside. First numbers (attention, embeddings), then figures, then a page.

Inspection never changes `forward`, and agrees with it. Each name is looked up when it is first used, so that
importing this package imports neither torch nor matplotlib.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from vitlab.inspect.attention import attention_maps as attention_maps
    from vitlab.inspect.attention import attention_rollout as attention_rollout
    from vitlab.inspect.attention import class_attention_grid as class_attention_grid
    from vitlab.inspect.attention import mean_attention_distance as mean_attention_distance
    from vitlab.inspect.embeddings import filter_components as filter_components
    from vitlab.inspect.embeddings import position_similarity as position_similarity
    from vitlab.inspect.report import Mistakes as Mistakes
    from vitlab.inspect.report import Phase as Phase
    from vitlab.inspect.report import Rollout as Rollout
    from vitlab.inspect.report import training_page as training_page
    from vitlab.inspect.report import write_page as write_page

HOMES = {
    "Mistakes": "vitlab.inspect.report",
    "Phase": "vitlab.inspect.report",
    "Rollout": "vitlab.inspect.report",
    "attention_maps": "vitlab.inspect.attention",
    "attention_rollout": "vitlab.inspect.attention",
    "class_attention_grid": "vitlab.inspect.attention",
    "filter_components": "vitlab.inspect.embeddings",
    "mean_attention_distance": "vitlab.inspect.attention",
    "position_similarity": "vitlab.inspect.embeddings",
    "training_page": "vitlab.inspect.report",
    "write_page": "vitlab.inspect.report",
}


def __getattr__(name: str) -> typing.Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"vitlab.inspect has no {name!r}; its public names are {', '.join(HOMES)}.")


def __dir__() -> list[str]:
    return [*HOMES]
