"""Sec. 4.1-4.2: from a config to a tested model, and from one task to another."""
