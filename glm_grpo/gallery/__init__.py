"""Gallery of a run: static pages with its pictures, scores and curves, made from its tables."""

from __future__ import annotations

from glm_grpo.gallery.write import update_gallery, write_gallery

__all__ = ["update_gallery", "write_gallery"]
