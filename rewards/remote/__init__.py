"""Scorers behind HTTP: their messages, the server of a term, and the term that asks one."""
