"""Gallery of a run: static pages with its images, scores and curves, made from its tables."""

from __future__ import annotations

from glm_grpo.studio.gallery.write import refresh_gallery, update_gallery, write_gallery

__all__ = ["refresh_gallery", "update_gallery", "write_gallery"]
