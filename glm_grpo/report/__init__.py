"""Pages that show what a run did, made from its stored tables alone."""
