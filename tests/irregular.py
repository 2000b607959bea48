"""Files that are not regular: reading one would never end."""

import os
import socket
from pathlib import Path


def irregular(kind: str, path: Path, aside: Path) -> None:
    """Makes `path` a "pipe", a "socket", a "device" or a link to one that lies in the folder `aside`."""
    if kind.startswith("link to a "):
        kind = kind.removeprefix("link to a ")
        target = Path(os.devnull).with_name("zero") if kind == "device" else aside / "target"
        path.symlink_to(target)
        path = target
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif not path.exists():
        path.symlink_to(Path(os.devnull).with_name("zero"))  # to make a device takes rights of its own
