"""The paper as a list of its parts. `vitlab paper fig7` shows one.

`parts.toml` names every section, equation, table and figure with its code, its command and what is known here.
`equations.py`, `tables.py` and `figures.py` have a function for each equation, table and figure.
"""
