"""The second embedded model: a small Janus that draws coloured shapes."""
