"""Sec. 4.1, App. B: the one training loop and what belongs to it. Importing this does not import torch."""
