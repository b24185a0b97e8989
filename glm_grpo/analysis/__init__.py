"""Rewards looked into: before a run, and after it from what it stored."""
