"""Hooks of mkdocs: links that lead out of docs/ are names on the site, which holds no source."""

import re
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|benchmarks|README|CONTRIBUTING|CHANGELOG|LICENSE|Makefile)[^)]*\)"
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    outside = "../" * (page.file.src_uri.count("/") + 1)
    return OUTSIDE.sub(lambda match: match[1] if f"]({outside}" in match[0] else match[0], markdown)
