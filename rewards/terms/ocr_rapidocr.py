"""Read text with RapidOCR: ONNX models from the wheel, on the CPU, without any download."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float32, Float64, UInt8
from rapidocr import RapidOCR
from rapidocr.ch_ppocr_rec import TextRecInput, TextRecOutput
from rapidocr.ch_ppocr_rec.typings import WordInfo
from rapidocr.utils.process_img import get_rotate_crop_image
from torch import Tensor, nn

from rewards.images import to_bgr_arrays
from rewards.terms.reading_orders import TextBox, cells_around, surest_reading, text_box

_TALL = 1.5
"""Ratio of the sides from which RapidOCR turns a box to the left before reading it."""

_LEAST_CONFIDENCE = 0.5
"""RapidOCR's default."""

_COLUMN_MIDDLE = 0.25
"""Where letters stand in the recogniser's columns, each 1/6 of the line's height wide. With 0.5,
drawn letters are placed 1/4 of a column too far along the line on average."""

_BLANK = "blank"
"""Stands for "no character" in the list of the recognition model."""


class RapidOcrReader:
    """Reads each image separately, several at the same time.

    onnxruntime's own thread pool is not used: its threads spin between operators, and compete with
    PyTorch's threads for the same cores during training. One thread per image scales better for
    small images, and needs no waiting for a pool: it takes 0.05 s of CPU time for an image of
    128 pixels with detection at 160. RapidOCR's pools take 0.13 s, and its default detection side
    of 736 takes 0.7 s without reading better.

    RapidOCR shrinks images whose sides exceed 2,000 pixels.

    Args:
        threads: Images read at the same time, >= 1.
        detection_side: Pixels, a multiple of 32: images with a shorter side are enlarged to this
            before text detection.
    """

    def __init__(self, *, threads: int, detection_side: int) -> None:
        self._threads = threads
        self._engine = _Engine(
            params={
                "Global.log_level": "critical",
                # The classifier turns upside-down lines, which prompts do not ask for.
                "Global.use_cls": False,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_type": "min",
                "Det.limit_side_len": detection_side,
                # Lines in a batch are padded to the widest one, which can change the result: a
                # score would depend on neighbouring lines.
                "Rec.rec_batch_num": 1,
                "Global.return_word_box": True,
            }
        )

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[list[TextBox]]:
        """Read several images at the same time."""
        with ThreadPoolExecutor(self._threads) as executor:
            return list(executor.map(self._read_one, to_bgr_arrays(pixels)))

    def alphabet(self) -> frozenset[str]:
        """Characters of the recognition model."""
        # Models are loaded on first use; reading a line without detection only loads this one.
        self._engine(np.zeros((48, 48, 3), dtype=np.uint8), use_det=False)
        return frozenset(self._engine.text_rec.postprocess_op.character) - {_BLANK}

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because ONNX models stay on the CPU."""
        return ()

    def _read_one(self, image: UInt8[np.ndarray, "H W 3"]) -> list[TextBox]:
        # A box may be read with confidence only the other way round.
        found = self._engine(image, use_det=True, text_score=0.0)
        if found.boxes is None or found.txts is None:
            return []
        boxes = []
        lines = zip(found.boxes, found.txts, found.scores, found.word_results, strict=True)
        for corners, text, confidence, columns in lines:
            place = np.asarray(corners, dtype=np.float64)
            downwards = np.roll(place, -1, axis=0) if _is_tall(corners) else place
            upright = text_box(text, downwards, _cells(text, columns)), float(confidence)
            turned = self._read_turned(image, corners, np.roll(place, 1, axis=0))
            surest, sureness = surest_reading(upright, turned)
            if sureness >= _LEAST_CONFIDENCE:
                boxes.append(surest)
        return boxes

    def _read_turned(
        self,
        image: UInt8[np.ndarray, "H W 3"],
        corners: Float32[np.ndarray, "4 2"],
        upwards: Float64[np.ndarray, "4 2"],
    ) -> list[tuple[TextBox, float]]:
        """Read a tall box turned to the right; RapidOCR has turned it to the left."""
        if not _is_tall(corners):
            return []
        turned = get_rotate_crop_image(image, corners)[::-1, ::-1]
        line = TextRecInput(img=[np.ascontiguousarray(turned)], return_word_box=True)
        found = self._engine.text_rec(line)
        return [
            (text_box(text, upwards, _cells(text, columns)), float(confidence))
            for text, confidence, columns in zip(
                found.txts, found.scores, found.word_results, strict=True
            )
            if text.strip()
        ]


class _Engine(RapidOCR):
    """Keeps the columns of the recogniser in which letters were found.

    RapidOCR would make boxes of them, in whole pixels and of one width.
    """

    def calc_word_boxes(
        self, img: list[np.ndarray], dt_boxes: np.ndarray, rec_res: TextRecOutput
    ) -> tuple[WordInfo, ...]:
        del img, dt_boxes
        return tuple(rec_res.word_results)


def _is_tall(corners: Float32[np.ndarray, "4 2"]) -> bool:
    width, height = (np.linalg.norm(corners[0] - corners[beside]) for beside in (1, 3))
    return bool(height >= _TALL * width)


def _cells(text: str, columns: WordInfo) -> Float64[np.ndarray, "2 letters"]:
    """Where each character begins and ends along the line, 0..1; RapidOCR leaves out spaces."""
    letters = [index for index, letter in enumerate(text) if not letter.isspace()]
    found = np.concatenate(columns.word_cols) + _COLUMN_MIDDLE
    places = np.minimum(found / columns.line_txt_len, 1.0)
    return cells_around(np.interp(np.arange(len(text)), letters, places, left=0.0, right=1.0))
