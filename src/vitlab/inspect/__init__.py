"""Sec. 4.5, App. D.7-D.8: looking inside. First numbers (attention, embeddings), then figures, then a page.

Inspection never changes `forward`, and agrees with it. Each name is looked up when it is first used, so that
importing this package imports neither torch nor matplotlib. `capture` shares its module's name and
is imported from there: `from vitlab.inspect.capture import capture`.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from vitlab.inspect.attention import answer_grid as answer_grid
    from vitlab.inspect.attention import answer_weights as answer_weights
    from vitlab.inspect.attention import attention_layers as attention_layers
    from vitlab.inspect.attention import attention_maps as attention_maps
    from vitlab.inspect.attention import attention_rollout as attention_rollout
    from vitlab.inspect.attention import mean_attention_distance as mean_attention_distance
    from vitlab.inspect.attention import visit_attention as visit_attention
    from vitlab.inspect.embeddings import filter_components as filter_components
    from vitlab.inspect.embeddings import filters_of as filters_of
    from vitlab.inspect.embeddings import position_similarity as position_similarity
    from vitlab.inspect.embeddings import positions_of as positions_of
    from vitlab.inspect.embeddings import token_components as token_components
    from vitlab.inspect.page import write_page as write_page
    from vitlab.inspect.report import Inspection as Inspection
    from vitlab.inspect.report import Mistakes as Mistakes
    from vitlab.inspect.report import Phase as Phase
    from vitlab.inspect.report import Rollout as Rollout
    from vitlab.inspect.report import checkpoint_page as checkpoint_page
    from vitlab.inspect.report import training_page as training_page

HOMES = {
    "Inspection": "vitlab.inspect.report",
    "Mistakes": "vitlab.inspect.report",
    "Phase": "vitlab.inspect.report",
    "Rollout": "vitlab.inspect.report",
    "answer_grid": "vitlab.inspect.attention",
    "answer_weights": "vitlab.inspect.attention",
    "attention_layers": "vitlab.inspect.attention",
    "attention_maps": "vitlab.inspect.attention",
    "attention_rollout": "vitlab.inspect.attention",
    "checkpoint_page": "vitlab.inspect.report",
    "filter_components": "vitlab.inspect.embeddings",
    "filters_of": "vitlab.inspect.embeddings",
    "mean_attention_distance": "vitlab.inspect.attention",
    "position_similarity": "vitlab.inspect.embeddings",
    "positions_of": "vitlab.inspect.embeddings",
    "token_components": "vitlab.inspect.embeddings",
    "training_page": "vitlab.inspect.report",
    "visit_attention": "vitlab.inspect.attention",
    "write_page": "vitlab.inspect.page",
}


def __getattr__(name: str) -> typing.Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"vitlab.inspect has no {name!r}; its public names are {', '.join(HOMES)}.")


def __dir__() -> list[str]:
    return [*HOMES]
