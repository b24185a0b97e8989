"""What a run writes and shows: tables, trackers, summaries, the terminal."""
