"""The paper as a list of its parts, each of which can be shown: `vitlab paper fig7`.

`parts.toml` names every section, equation, table and figure with its code, its command and what is known here.
`equations.py`, `tables.py` and `figures.py` have a function for each equation, table and figure.
"""
