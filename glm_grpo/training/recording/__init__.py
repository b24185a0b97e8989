"""Records of a run: tables, trackers, summaries, the terminal."""
