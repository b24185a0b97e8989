"""Collect experience in other processes, through Ray, while this one learns."""
