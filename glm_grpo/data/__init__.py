"""Prompts and target pictures: found, read, checked, dealt out."""
