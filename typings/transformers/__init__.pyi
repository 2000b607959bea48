# Its own 3,000 modules take pyright a quarter of a minute, and tell little of what a lazy import returns.
from typing import Any

def __getattr__(name: str) -> Any: ...
