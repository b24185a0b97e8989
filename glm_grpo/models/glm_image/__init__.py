"""All that knows the upstream model: token grids, sampling, replay, decoding."""
