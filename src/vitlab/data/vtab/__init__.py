"""Sec. 4.3: the VTAB-1k tasks and the data sets that only they read."""
