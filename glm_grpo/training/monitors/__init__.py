"""Watchers of a run: reward hacking, cheap decode."""
