"""Faster forms of stock steps; the self-check compares them with what they replace."""
