"""The embedded model: a miniature GLM-Image, with its world, training and weights."""
