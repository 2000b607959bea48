"""Sec. 4.3-4.4, App. D: many runs, one page."""
