"""RapidOCR as a text reader: ONNX models from the wheel, on the CPU, without any download."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import UInt8
from rapidocr import RapidOCR
from rapidocr.utils.output import RapidOCROutput
from torch import Tensor, nn

from rewards.terms.ocr import join_in_reading_order, text_box, to_bgr_arrays

_THINNEST, _ROOM = 100, 8
"""Longer side by the shorter: of pictures that are handed over as they are, and of others."""

_BLANK = "blank"
"""Stands for "no character" in the list of the recognition model."""


class RapidOcrReader:
    """Reads each picture by itself, several at the same time.

    onnxruntime's own thread pool is not used: its threads spin between operators, and inside a
    training step they fight with those of PyTorch for the same cores. One thread per picture
    scales better with pictures this small, and needs no pool to wait on: 0.05 s of CPU time for a
    picture of 128 pixels searched at 160, where RapidOCR's pools take 0.13 s, and its own
    detection side of 736 takes 0.7 s without reading better.

    Pictures of more than 2,000 pixels a side are shrunk by RapidOCR.

    Args:
        threads: Pictures read at the same time, >= 1.
        detection_side: Pixels, a multiple of 32: pictures with a shorter side below it are
            enlarged before text is searched.
    """

    def __init__(self, *, threads: int, detection_side: int) -> None:
        self._threads = threads
        self._engine = RapidOCR(
            params={
                "Global.log_level": "critical",
                # The classifier turns lines that stand on their head: not what prompts ask for.
                "Global.use_cls": False,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_type": "min",
                "Det.limit_side_len": detection_side,
                # Lines of a batch are padded to the widest one, which can change what is read:
                # a score would depend on the picture's neighbours.
                "Rec.rec_batch_num": 1,
            }
        )

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
        """Read N pictures: the text of each in reading order, "" where there is none."""
        with ThreadPoolExecutor(self._threads) as executor:
            return list(executor.map(self._read_one, to_bgr_arrays(pixels)))

    def alphabet(self) -> frozenset[str]:
        """The characters of the recognition model."""
        # Models are loaded at the first use; a line without detection uses this one alone.
        self._engine(np.zeros((48, 48, 3), dtype=np.uint8), use_det=False)
        return frozenset(self._engine.text_rec.postprocess_op.character) - {_BLANK}

    def modules(self) -> tuple[nn.Module, ...]:
        """ONNX models stay on the CPU."""
        return ()

    def _read_one(self, picture: UInt8[np.ndarray, "H W 3"]) -> str:
        found = self._engine(_with_room(picture), use_det=True)
        if not isinstance(found, RapidOCROutput):
            raise TypeError(
                f"RapidOCR returned a {type(found).__name__}: it found lines but recognised none; "
                "check the installation by the command `rapidocr check`"
            )
        if found.boxes is None or found.txts is None:
            return ""
        corners = np.asarray(found.boxes, dtype=np.float64)
        return join_in_reading_order([*map(text_box, found.txts, corners)])


def _with_room(picture: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H2 W2 3"]:
    """Widens a strip by black on both sides: RapidOCR would shrink its shorter side to nothing."""
    height, width = picture.shape[:2]
    longer = max(height, width)
    if longer <= _THINNEST * min(height, width):
        return picture
    rows, columns = (max(0, longer // _ROOM - side) // 2 for side in (height, width))
    return np.pad(picture, ((rows, rows), (columns, columns), (0, 0)))
