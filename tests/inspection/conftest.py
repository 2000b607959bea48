"""A small finished run for the tests of this folder."""

from pretrained_run import config, pretrained, workdir

__all__ = ["config", "pretrained", "workdir"]
