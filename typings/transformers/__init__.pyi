# pyright takes half a minute to read the package itself, whose lazy imports have no types.
from typing import Any

def __getattr__(name: str) -> Any: ...
