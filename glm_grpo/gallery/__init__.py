"""The gallery of a run: static pages that show its pictures, scores and curves, from its tables."""

from __future__ import annotations

from glm_grpo.gallery.write import update_gallery, write_beside, write_gallery

__all__ = ["update_gallery", "write_beside", "write_gallery"]
