"""The table of a paper: mean@1 and best@k of held-out prompts by group, and how it was made."""
