"""Scorers behind HTTP: their wire format, the server of a term, and the term that asks one."""
