"""Take screenshots of a run's gallery for the README.

python -m tools.site.screenshots RUN [--step 3] [--prefix gallery] [--chromium PATH]

Opens the gallery of the run from disk in a headless Chromium and writes docs/images/gallery_*.png,
with that of credit by place if the run has it.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

from glm_grpo.studio.gallery.data import credit_key

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = ViewportSize(width=1200, height=760)
COLOURS = 256
"""Enough for flat drawings; all colours would make the files three times as large."""
WHOLE_GROUPS_IN_ROWS = """
localStorage.setItem("glm-grpo.groups.size", 112);
localStorage.setItem("glm-grpo.groups.density", "captions");
"""
"""Eight samples and their target side by side, and little below them."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=3, help="whose groups are shown")
    parser.add_argument("--prefix", default="gallery", help="how the names of the files begin")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    views = {
        "start": "start",
        "progress": "progress",
        "groups": f"groups?step={options.step}",
    }
    gallery = options.run / "gallery"
    address = (gallery / "index.html").resolve().as_uri()
    has_credit = (gallery / "data" / f"{credit_key(options.step)}.js").is_file()
    if has_credit:
        views["credit"] = f"groups?step={options.step}&credit=1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        for name, view in views.items():
            # Changing only the fragment would not reload the page.
            page.goto("about:blank")
            if name == "credit":
                page.add_init_script(WHOLE_GROUPS_IN_ROWS)
            page.goto(f"{address}#{view}")
            page.locator("main img").first.wait_for()
            page.wait_for_load_state("networkidle")
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            image.quantize(COLOURS).save(IMAGES / f"{options.prefix}_{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
