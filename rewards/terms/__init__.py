"""Reward terms, one file each."""
