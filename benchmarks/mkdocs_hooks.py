"""Hooks of mkdocs: notebooks become pages, and links that lead out of docs/ are names, as the site holds no source."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|benchmarks|README|CONTRIBUTING|CHANGELOG|LICENSE|Makefile)[^)]*\)"
)
NOTEBOOK = re.compile(r"\]\(([\w/.-]+)\.ipynb\)")


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of docs/: each notebook is replaced by a Markdown page of its name."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text("utf-8"))
        files.remove(file)
        name = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, name, content=to_markdown(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    outside = "../" * (page.file.src_uri.count("/") + 1)
    markdown = OUTSIDE.sub(lambda match: match[1] if f"]({outside}" in match[0] else match[0], markdown)
    return NOTEBOOK.sub(r"](\1.md)", markdown)


def to_markdown(notebook: Mapping[str, Any]) -> str:
    """The cells of a notebook with their stored outputs: images and HTML as they are, everything else as text."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif "text/html" in data:
                parts.append(f'<div style="overflow-x: auto">{"".join(data["text/html"])}</div>')
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
