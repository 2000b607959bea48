"""The web page of a checkpoint: drop an image, see predictions and attention; on loopback, without a network."""

from vitlab.app.server import launch as launch
