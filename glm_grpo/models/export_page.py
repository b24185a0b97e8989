"""The page and the program of an export, and the settings that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import metadata, version
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData, hf_hub_download, metadata_load

from glm_grpo.config.sections import EMBEDDED_MODELS, DecodeSection, RolloutSection
from glm_grpo.output import counted

README = "README.md"
PROGRAM = "generate.py"
LABEL_HEIGHT = 24
"""Pixels above the images of its sheet, for their labels."""

_LIBRARIES = ("accelerate", "diffusers", "transformers")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class StockSettings:
    """How a run sampled and decoded, in the parameters of stock classes.

    Attributes:
        base: Folder or hub id of the model that the run started from.
        rollout: How tokens were sampled, and the size of images.
        decode: How tokens were decoded.
        license: Hub name of the base's licence; None: unknown.
        summary: Sentences of the card, in Markdown, on the run.
        results: Sections on what training changed.
        training: Likewise on how the weights were trained.
        prompt: Prompt of the card's example, for generation or editing.
        groups: The last section, on groups of prompts; empty if there is none.
        num_sources: Source images per prompt; 0: text-to-image.
        embedded: Name of the base if it is in the package; None: it is not.
        known_form: Form of the only prompts that the base knows; None: it knows any.
        notes: What to know about prompts and weights.
        method: Tags of how the weights were trained.
        name: Name of the run, the title of the page; None: what the weights are is the title.
    """

    base: str
    dtype: str
    rollout: RolloutSection
    decode: DecodeSection
    license: str | None
    summary: str
    results: str
    training: str
    prompt: str
    groups: str = ""
    num_sources: int = 0
    embedded: str | None = None
    known_form: str | None = None
    notes: Sequence[str] = ()
    method: Sequence[str] = ()
    name: str | None = None

    @property
    def is_on_hub(self) -> bool:
        """Whether `base` is a hub id."""
        return bool(_HUB_ID.fullmatch(self.base)) and not Path(self.base).exists()

    @property
    def base_name(self) -> str:
        """Name of the base without the local path, which means nothing on another machine."""
        if self.embedded is not None:
            return f"glm_grpo.{self.embedded}"
        return self.base if self.is_on_hub else Path(self.base).name

    @property
    def base_place(self) -> str:
        """Hub id of the base; for a folder, a placeholder for the reader to fill in."""
        if self.is_on_hub:
            return self.base
        if self.embedded is not None:
            return f"PATH/TO/glm_grpo/{EMBEDDED_MODELS[self.embedded]}"
        return f"PATH/TO/{self.base_name}"

    @property
    def base_code(self) -> str:
        """Python expression for the base."""
        if self.embedded is not None:
            return f'find_model("{self.embedded}").path'
        return repr(self.base_place)


@dataclass(frozen=True)
class Card:
    """What a family writes about an export.

    Attributes:
        title: What the weights are.
        metadata: For the hub, which accepts a base model only by its hub id.
        license: Sentences on the licence.
        notes: What a user must know to generate images.
        snippet: Python that loads the weights and saves one image; empty: `generate.py` is enough.
        imports: Import statements of `generate.py`.
        load: Its Python that loads the weights from `here` onto `device`, and defines `draw()`,
            which returns an image for `options.prompt`.
        to_base: Its Python after which `draw()` uses the base.
        has_adapter: Whether the base is loaded in any case; otherwise only with `--base`.
    """

    title: str
    metadata: ModelCardData
    license: str
    notes: Sequence[str]
    snippet: str
    imports: str
    load: str
    to_base: str
    has_adapter: bool


def write_card(directory: Path, card: Card, settings: StockSettings) -> None:
    """Write the page and the program of an export into its folder."""
    page = _page(card, settings, repository=f"YOUR-NAME/{directory.resolve().name}")
    (directory / README).write_text(page, encoding="utf-8")
    (directory / PROGRAM).write_text(_program(card, settings), encoding="utf-8")


def project_link() -> str:
    """Markdown for the name of this project, with the address that its package states, if any."""
    stated = metadata("glm-grpo").get_all("Project-URL") or []
    addresses = dict(each.split(", ", 1) for each in stated)
    address = addresses.get("Repository") or addresses.get("Homepage")
    return f"[glm-grpo]({address})" if address else "glm-grpo"


def _page(card: Card, settings: StockSettings, *, repository: str) -> str:
    calls = [["python", PROGRAM, settings.prompt]]
    shows = "the base model and these weights"
    if not card.has_adapter:
        shows = "these weights, with `--base` also the base model"
        calls.append([*calls[0], "--base", settings.base_place])
    elif not settings.is_on_hub:
        calls = [[*calls[0], "--base", settings.base_place]]
    folder = shlex.quote(repository.partition("/")[2])
    notes = [*settings.notes, *card.notes]
    if settings.known_form is not None:
        notes.insert(0, f"The model knows only prompts of the form `{settings.known_form}`.")
    if settings.embedded is not None:
        notes.insert(
            0,
            "The base model is a folder of the installed package glm-grpo; `python -c 'from "
            f"glm_grpo.models.find import find_model; print({settings.base_code})'` prints it.",
        )
    elif not settings.is_on_hub:
        notes.insert(0, f"`{settings.base_place}` stands for the folder of the base model.")
    libraries = [f"{name}=={version(name)}" for name in _LIBRARIES]
    if card.has_adapter:
        libraries.append(f"peft=={version('peft')}")
    snippet = f"""
In your own code, run in this folder:

```python
{card.snippet}
```
"""
    return f"""\
---
{card.metadata.to_yaml()}
---

# {settings.name or card.title}

{f"{card.title}, trained" if settings.name else "Trained"} by {project_link()}. {card.license}

{settings.summary}
## Generate an image

Download this repository, and run in its folder:

```bash
hf download {shlex.quote(repository)} --local-dir {folder}
cd {folder}
pip install torch torchvision {" ".join(libraries)}
{chr(10).join(map(shlex.join, calls))}
```

[`{PROGRAM}`]({PROGRAM}) saves `image.png`, which shows {shows}, with the same seed.

{"".join(f"- {note}{chr(10)}" for note in notes)}{snippet if card.snippet else ""}
{settings.results}
{chr(10).join(filter(None, [settings.training, settings.groups]))}"""


def _program(card: Card, settings: StockSettings) -> str:
    base = 'help="folder or hub id of the base model, to draw with it too"'
    if card.has_adapter:
        known = f"default={settings.base!r}" if settings.is_on_hub else "required=True"
        base = f'{known}, help="folder or hub id of the base model"'
    sources = ""
    if settings.num_sources:
        paths = [f"source-{number}.png" for number in range(1, settings.num_sources + 1)]
        kind = f"type=expanduser, nargs={len(paths)}, default={paths!r}"
        sources = f'parser.add_argument("--sources", {kind})\n'
    note = ""
    if settings.known_form is not None:
        told = f"note: the model knows only prompts of the form {settings.known_form}"
        note = f"print({told!r}, file=sys.stderr)\n"
    to_base = f'{card.to_base}\nimages = {{"base": draw(), **images}}'
    hint = ""
    if not card.has_adapter:
        to_base = "if options.base:\n" + "\n".join(f"    {line}" for line in to_base.splitlines())
        told = "to draw the base model beside it: --base, with its folder or hub id"
        hint = f"if not options.base:\n    print({told!r})\n"
    return f'''\
"""Draw a prompt with the base model and with these weights, as in the run's evaluations."""

import argparse
{"import sys" + chr(10) if note else ""}from os.path import expanduser
from pathlib import Path

import torch
from PIL import Image, ImageDraw
{card.imports}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt", nargs="?", default={settings.prompt!r})
parser.add_argument("--base", type=expanduser, {base})
{sources}parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", type=expanduser, default="image.png")
options = parser.parse_args()
if options.base and not Path(options.base).is_dir() and options.base.count("/") != 1:
    parser.error(f"--base {{options.base}}: there is no such folder")
{note}here = Path(__file__).resolve().parent
device = "cuda" if torch.cuda.is_available() else "cpu"

{card.load}


images = {{"trained": draw()}}
{to_base}
width, height = images["trained"].size
sheet = Image.new("RGB", (len(images) * width, height + {LABEL_HEIGHT}), "white")
for index, (name, image) in enumerate(images.items()):
    ImageDraw.Draw(sheet).text((index * width + 4, 6), name, fill="black")
    sheet.paste(image, (index * width, {LABEL_HEIGHT}))
sheet.save(options.output)
print(f"saved {{Path(options.output).absolute()}} ({{' | '.join(images)}})")
{hint}'''


def describe_sampling(rollout: RolloutSection) -> str:
    """Describe temperature, truncation and guidance, such as `temperature 0.9, top_p 0.75`."""
    limits = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    dropping = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
    guidance = rollout.guidance_scale
    guided = [] if guidance is None else [f"guidance {guidance:g}"]
    said = [f"temperature {rollout.temperature:g}", *(dropping or ["no token dropped"]), *guided]
    return ", ".join(said)


def describe_decoding(decode: DecodeSection) -> str:
    """Describe how tokens were decoded, such as `20 steps, guidance 1.5`."""
    if decode.steps is None:
        return "one pass"
    return f"{counted(decode.steps, 'step')}, guidance {decode.guidance_scale:g}"


def find_license(base: str) -> str | None:
    """Find the licence of a pipeline in its model card.

    Args:
        base: Folder or hub id.

    Returns:
        Its name on the hub, such as `mit`; None if no card can be read.
    """
    try:
        card = Path(base) / README
        if not Path(base).is_dir():
            card = Path(hf_hub_download(base, README))
        found = (metadata_load(card) or {}).get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, str) else None
