"""A small finished run for the tests of this folder."""

from pretrained_run import config, pretrained, workdir
from staged_job import staged

__all__ = ["config", "pretrained", "staged", "workdir"]
