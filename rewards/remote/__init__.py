"""Score over HTTP: the messages, a server for a term, and the term that is its client."""
