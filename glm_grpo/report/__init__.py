"""Reports on runs: rescored, compared, probed before they begin."""
