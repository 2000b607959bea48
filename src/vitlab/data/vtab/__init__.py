"""Sec. 4.3: the VTAB-1k tasks, and the published data sets they are made of."""
