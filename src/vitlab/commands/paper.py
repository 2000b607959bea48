"""The command about the paper itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from vitlab.commands import CHECKPOINTS, IMAGES, Device, Json, print_note, print_result


@dataclass(frozen=True)
class Paper:
    """Show an equation, a table or a figure of the paper, with its code and what is known about it here."""

    part: Annotated[Positional[str], tyro.conf.arg(metavar="PART")] = ""
    """`eq1` to `eq8`, `table1` to `table9`, `fig1` to `fig14`, or a section: `sec4.5`. Without it, all are listed."""
    checkpoint: Annotated[
        Positional[str | None],
        tyro.conf.arg(
            metavar="CHECKPOINT",
            help=f"For equations and for figures of a model (6, 7, 10, 11, 14). {CHECKPOINTS} Default: a small ViT, "
            "also where images are given alone.",
        ),
    ] = None
    images: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE ...", help=IMAGES)] = ()
    out: Path = Path("paper")
    """Folder for figures."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        from vitlab.commands.check import check_inputs
        from vitlab.data.decode import IMAGE_SUFFIXES
        from vitlab.paper.parts import find_parts, read_groups

        if not self.part:
            from vitlab.paper.show import list_text

            parts = [{"key": part.key, **vars(part)} for group in read_groups() for part in group.parts]
            print_result(parts, self.json, list_text())
            return 0
        key = find_parts(self.part)[0].key
        print_note(f"showing {key} ...")
        checkpoint, images = self.checkpoint, self.images
        if checkpoint and ("://" in checkpoint or Path(checkpoint).suffix.lower() in IMAGE_SUFFIXES):
            checkpoint, images = None, (checkpoint, *images)
        check_inputs(checkpoint, images=images)
        from vitlab.paper.figures import Request
        from vitlab.paper.show import show

        request = Request(checkpoint, images, self.out, self.device, log=print_note)
        shown = show(key, request)
        print_result(shown.as_dict(), self.json, shown.as_text())
        return 0
