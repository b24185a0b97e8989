"""The embedded model: a real GLM-Image in miniature, its world, its training and its weights."""
