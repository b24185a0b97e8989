"""Score how far an image shows the objects, numbers, colours and positions that a prompt wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Literal

import torch
from jaxtyping import UInt8
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import FLOAT32_BYTES, Reward, TermConfig
from rewards.detection import Detection
from rewards.options import MayChange, PathText, problem_at
from rewards.terms.clip_loading import ClipOptions
from rewards.terms.composition_found import describe_found
from rewards.terms.composition_rows import Composition, CompositionError, read_composition
from rewards.terms.composition_rule import PUBLISHED, Limits, colours_needed, judge
from rewards.terms.composition_score import score_densely
from rewards.terms.detectors.base import Detector
from rewards.terms.detectors.base import Limits as DetectorLimits
from rewards.terms.detectors.loading import (
    check_detector,
    detector_classes,
    detector_memory_bytes,
    is_function,
    load_detector,
)
from rewards.terms.detectors.trust import (
    EarlyWatch,
    describe_unknown,
    read_test_image,
    refuse_blind,
)
from rewards.terms.object_colours import (
    ObjectColours,
    check_object_colours,
    object_colours_bytes,
)
from rewards.types import Prompt, RewardError, Scores
from rewards.unpickling import loads_tensors_alone
from rewards.user_functions import NamedFunction

_KIND = "composition"
_DETECTOR = f"{_KIND}.detector"

_MASK2FORMER = "facebook/mask2former-swin-small-coco-instance"
_MASK2FORMER_BYTES = 69_000_000 * FLOAT32_BYTES


class CompositionConfig(TermConfig):
    """Objects, numbers, colours and positions that the prompt asks for, found by a detector."""

    compares_with = ("objects",)
    files = ("clip_model", "clip_weights", "test_image")
    folders = ("detector",)
    score_map = "always"

    kind: Literal["composition"]
    """Class that scores."""
    detector: PathText = _MASK2FORMER
    """A hub id, downloaded once, or a folder, of Mask2Former (masks), RT-DETR, RT-DETRv2 or D-FINE
    (boxes), OWLv2 or GroundingDINO (boxes, any class); or a function of yours, `file.py:detect`. It
    gets images UInt8 [N, 3, H, W] and class names, and returns a list of `rewards.Detection` for
    each image."""
    folder: MayChange[PathText | None] = None
    """Folder of the function's file or module. null: the folder of the config if it is there,
    otherwise the working folder; a run stores what it found."""
    score: Literal["dense", "verdict"] = "dense"
    """`dense`: 0..1, rises with each object that gets better; `verdict`: 1 if the image is right by
    the rule of GenEval, otherwise 0."""
    threshold: float = Field(default=PUBLISHED.threshold, gt=0.0, lt=1.0)
    """An object is found if the detector's score is above this."""
    counting_threshold: float = Field(default=PUBLISHED.counting_threshold, gt=0.0, lt=1.0)
    """The same for prompts with the tag `counting`."""
    position_margin: float = Field(default=PUBLISHED.position_margin, ge=0.0)
    """Fraction of the sizes of two objects by which their centres must be apart, before one is left
    of, right of, above or below the other."""
    max_objects: int = Field(default=PUBLISHED.max_objects, ge=1, le=1000)
    """Largest number of objects of a class that count in an image; the best ones do."""
    clip_model: PathText = "ViT-L-14-quickgelu"
    """An open_clip architecture, or the path of a model config in open_clip's JSON format; it
    judges the colours of objects."""
    clip_weights: PathText | None = "openai"
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file. null: no
    CLIP; only a function as detector can then give colours."""
    images_at_once: MayChange[int] = Field(default=8, ge=1, le=10_000)
    """Images that go through the detector together; fewer need less memory."""
    test_image: MayChange[PathText | None] = None
    """Image in which the detector must find a `test_class` when the run starts. null: no test."""
    test_class: MayChange[str | None] = Field(default=None, min_length=1)
    """Class of an object in `test_image`."""

    @model_validator(mode="after")
    def _test_is_whole(self) -> CompositionConfig:
        for option, other in (("test_class", "test_image"), ("test_image", "test_class")):
            if getattr(self, option) is None and getattr(self, other) is not None:
                rule = f"is missing, although {other} is {getattr(self, other)!r}"
                raise problem_at((option,), None, rule, f"set it, too, or leave {other} out")
        return self

    def limits(self) -> Limits:
        """Limits of the rule."""
        return Limits(
            threshold=self.threshold,
            counting_threshold=self.counting_threshold,
            max_objects=self.max_objects,
            position_margin=self.position_margin,
        )

    @override
    def has_score_map(self) -> bool:
        """Whether it is dense: a verdict belongs to the whole image."""
        return self.score == "dense"

    @override
    def users_function(self) -> NamedFunction | None:
        if not is_function(self.detector):
            return None
        return NamedFunction("detector", self.detector, self.folder)

    @override
    def judges(self) -> Mapping[str, str]:
        detector = {self.detector: "" if is_function(self.detector) else "transformers"}
        rule = f"GenEval's rule above {self.threshold:g}, {self.counting_threshold:g} for counting"
        clip = self._clip()
        if clip is None:
            return {**detector, rule: ""}
        weights = PurePath(clip.clip_weights).name
        colours = f"colours by CLIP {PurePath(clip.clip_model).name} {weights}"
        return {**detector, rule: "", colours: "open-clip-torch"}

    @override
    def check(self) -> None:
        check_detector(self.detector, key=_DETECTOR, folder=self.folder)
        if (clip := self._clip()) is not None:
            check_object_colours(clip, kind=_KIND)
        if self.test_image is not None and self.test_class is not None:
            read_test_image(self.test_image, kind=_KIND)
            known = detector_classes(self.detector, key=_DETECTOR, folder=self.folder)
            if known is not None and self.test_class not in known:
                unknown = describe_unknown(self.test_class, known, name=self.detector, kind=_KIND)
                raise RewardError(f"{_KIND}.test_class {self.test_class!r}: {unknown}")

    @override
    def check_metadata(self, rows: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
        known = detector_classes(self.detector, key=_DETECTOR, folder=self.folder)
        for prompt, metadata in rows.items():
            try:
                self.check_row(prompt, metadata, known)
            except RewardError as error:
                yield str(error)

    def check_row(
        self, prompt: str, metadata: Mapping[str, object], known: Sequence[str] | None
    ) -> Composition | None:
        """Read what a prompt's images should show.

        Args:
            prompt: What errors call it.
            metadata: The prompt's.
            known: Classes of the detector; None: any.

        Returns:
            None if the prompt asks for no objects.

        Raises:
            RewardError: It is not in the form of GenEval, or no image could be right: the detector
                does not know a class, finds fewer objects, or nothing judges colours.
        """
        try:
            composition = read_composition(metadata)
        except CompositionError as error:
            raise RewardError(f"prompt {prompt}: {error}") from error
        problem = None if composition is None else self._problem(composition, known)
        if problem is not None:
            raise RewardError(f"prompt {prompt} {problem}")
        return composition

    @override
    def build(self, device: torch.device) -> Reward:
        return CompositionReward(self, device)

    def build_detector(self, device: torch.device) -> Detector:
        """Load the detector, and test it if there is a test image.

        Raises:
            RewardError: It cannot be loaded, or does not find what the test image shows.
        """
        detector = load_detector(
            self.detector,
            device,
            key=_DETECTOR,
            limits=DetectorLimits(max_per_class=self.max_objects),
            folder=self.folder,
        )
        if self.test_image is not None and self.test_class is not None:
            refuse_blind(
                detector,
                self.test_image,
                self.test_class,
                threshold=self.threshold,
                name=self.detector,
                kind=_KIND,
            )
        return detector

    def build_colours(self, device: torch.device) -> ObjectColours | None:
        """Load CLIP; None without it."""
        clip = self._clip()
        if clip is None:
            return None
        with loads_tensors_alone():
            return ObjectColours(clip, device, kind=_KIND)

    @override
    def memory_bytes(self) -> int:
        """Size of detector and CLIP; another detector than the default once it is downloaded."""
        clip = self._clip()
        of_clip = 0 if clip is None else object_colours_bytes(clip)
        usual = _MASK2FORMER_BYTES if self.detector == _MASK2FORMER else 0
        return (detector_memory_bytes(self.detector) or usual) + of_clip

    def _problem(self, composition: Composition, known: Sequence[str] | None) -> str | None:
        """Why no image could be right, with the rule and the remedy."""
        for label in composition.classes:
            if known is not None and label not in known:
                unknown = describe_unknown(label, known, name=self.detector, kind=_KIND)
                return f"asks for {label!r}: {unknown}"
        for condition in (*composition.include, *composition.exclude):
            if condition.count > self.max_objects:
                return (
                    f"asks for {condition.count} {condition.label}, but at most "
                    f"composition.max_objects = {self.max_objects} objects of a class count; "
                    "raise it, or ask for fewer"
                )
        colours = [each.colour for each in composition.include if each.colour is not None]
        if colours and self.clip_weights is None and not is_function(self.detector):
            return (
                f"asks for something {colours[0]}, but composition.clip_weights is null and "
                f"composition.detector {self.detector!r} gives no colours; set "
                "composition.clip_weights=openai"
            )
        return None

    def _clip(self) -> ClipOptions | None:
        if self.clip_weights is None:
            return None
        return ClipOptions(clip_model=self.clip_model, clip_weights=self.clip_weights)


class CompositionReward:
    """How far an image shows the objects that its prompt asks for, 0..1, higher is better.

    `dense`: see `score_densely`; `verdict`: 1 or 0, see `judge`. The notes are what is wrong by the
    verdict, and empty if nothing is.

    Mask2Former, Swin-S, trained on COCO's instances by Meta: 69 million parameters, 0.3 GB of
    memory in float32 besides the activations; CLIP ViT-L/14 1.7 GB, MIT.
    Source: Ghosh et al., GenEval, NeurIPS 2023, https://github.com/djghosh13/geneval, whose
    detector is of the same architecture and classes, trained by mmdetection: figures are close to
    published ones, not equal.

    Raises:
        RewardError: Detector or CLIP cannot be loaded, or the detector does not find what the test
            image shows.
    """

    def __init__(self, config: CompositionConfig, device: torch.device) -> None:
        # First, because a mistake in it or the user's function shows before CLIP is loaded.
        self._detector = config.build_detector(device)
        self._colours = config.build_colours(device)
        self._config = config
        self._limits = config.limits()
        self._watch = EarlyWatch(threshold=config.threshold, name=config.detector, kind=_KIND)

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt's metadata ask for objects.

        Raises:
            RewardError: They do, but no image could be right; see `CompositionConfig.check_row`.
        """
        known = self._detector.classes()
        return self._config.check_row(prompt.prompt_id, prompt.metadata, known) is not None

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Score N images by what the detector finds in them."""
        return replace(self.score_with_map(prompts, pixels), score_map=None)

    @torch.no_grad()
    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`; a dense score has boxes of objects, see `score_densely`."""
        compositions = [_read(prompt) for prompt in prompts]
        found = self._find(prompts, compositions, pixels)
        pairs = list(zip(compositions, found, strict=True))
        verdicts = [judge(*pair, self._limits) for pair in pairs]
        notes = tuple("; ".join(verdict.reasons) for verdict in verdicts)
        objects = tuple(describe_found(*pair, self._limits) for pair in pairs)
        if self._config.score == "verdict":
            values = torch.tensor([float(verdict.is_right) for verdict in verdicts])
            return Scores(values, notes, objects=objects)
        scores = [score_densely(*pair, self._limits) for pair in pairs]
        values = torch.tensor([score.value for score in scores])
        return Scores(values, notes, tuple(score.boxes for score in scores), objects)

    def modules(self) -> tuple[nn.Module, ...]:
        """The detector's networks, and CLIP."""
        colours = () if self._colours is None else self._colours.modules()
        return (*self._detector.modules(), *colours)

    def _find(
        self,
        prompts: Sequence[Prompt],
        compositions: Sequence[Composition],
        pixels: UInt8[Tensor, "N 3 H W"],
    ) -> list[list[Detection]]:
        """Detections in N images, with colours where they matter, and without masks."""
        found: list[list[Detection]] = [[] for _ in compositions]
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row, composition in enumerate(compositions):
            rows_of.setdefault(composition.classes, []).append(row)
        # A group is asked for the same classes, because one may depend on the others.
        for classes, rows in rows_of.items():
            for start in range(0, len(rows), self._config.images_at_once):
                part = rows[start : start + self._config.images_at_once]
                detections = self._detector.detect(pixels[part], classes)
                self._watch.see(detections)
                asked = [compositions[row] for row in part]
                named = [prompts[row].prompt_id for row in part]
                coloured = self._with_colours(named, asked, pixels[part], detections)
                for row, each in zip(part, coloured, strict=True):
                    # Masks of all images of a group can take gigabytes.
                    found[row] = [replace(detection, mask=None) for detection in each]
        return found

    def _with_colours(
        self,
        prompt_ids: Sequence[str],
        compositions: Sequence[Composition],
        pixels: UInt8[Tensor, "N 3 H W"],
        found: list[list[Detection]],
    ) -> list[list[Detection]]:
        needed = [
            colours_needed(composition, each, self._limits)
            for composition, each in zip(compositions, found, strict=True)
        ]
        asked = [
            [each[index] for index in indices] for each, indices in zip(found, needed, strict=True)
        ]
        if self._colours is not None:
            asked = self._colours.judge(pixels, asked)
        result = []
        for prompt_id, each, indices, judged in zip(prompt_ids, found, needed, asked, strict=True):
            coloured = dict(zip(indices, judged, strict=True))
            for detection in judged:
                if detection.colours is None:
                    raise RewardError(
                        f"prompt {prompt_id} asks for a colour, and composition.detector "
                        f"{self._config.detector!r} gives none for the {detection.label} that it "
                        "found; give colours={'red': 0.9, ...} to each Detection, or set "
                        "composition.clip_weights=openai"
                    )
            result.append([coloured.get(index, detection) for index, detection in enumerate(each)])
        return result


def _read(prompt: Prompt) -> Composition:
    composition = read_composition(prompt.metadata)
    if composition is None:
        raise ValueError(f"prompt {prompt.prompt_id} asks for no objects")
    return composition
