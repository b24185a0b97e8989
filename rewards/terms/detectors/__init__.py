"""Detectors: images and class names in, detections out.

`loading.load_detector` builds one from its name: a hub id or folder of a stock transformers class
(`segmentation` for Mask2Former, `boxes` for RT-DETR and its kin, `zero_shot` for OWLv2 and
GroundingDINO), or a function of one's own (`function`). `loading.check_detector` and
`loading.detector_classes` read configs only, before any weights are loaded. `trust` notices a
detector that finds nothing.

Scores are returned down to a small floor, because a dense score also counts what is below the
threshold.
"""
