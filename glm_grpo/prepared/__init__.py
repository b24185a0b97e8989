"""What is known of a run before its models are loaded, and how they are loaded and joined."""
