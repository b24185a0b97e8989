"""Train the embedded Janus from scratch: `python -m tools.tiny.objects.pretrain --work FOLDER`.

Stages, each resumable and with fixed seeds: tokenizer (VQ model), policy (language model), detector
(RT-DETRv2), assemble. `--stage` runs only one stage; the first three can run in parallel. Without
it all stages run in turn and write FOLDER/janus and FOLDER/detector, which ship as
`glm_grpo/tiny/objects/weights/`.
"""

from __future__ import annotations

from pathlib import Path

from glm_grpo.tiny.objects import world
from tools.tiny.objects.models import build_model, build_processor
from tools.tiny.objects.train_detector import build_detector, train_detector
from tools.tiny.objects.train_policy import train_policy
from tools.tiny.objects.train_tokenizer import check_tokenizer, train_tokenizer
from tools.tiny.stage import run_stages

SEED = 20261129
CLEAN_STEPS = 3500
CARELESS_STEPS = 500
CARELESS_RATE = 0.4
DETECTOR_STEPS = 3500

_STAGES = ("tokenizer", "policy", "detector", "assemble")


def main() -> None:
    """Run the command line."""
    run_stages(_STAGES, _run, description=__doc__.splitlines()[0])


def _run(stage: str, work: Path) -> None:
    codes = len(world.cell_atlas())
    model = build_model(codes, seed=SEED)
    processor = build_processor(codes)
    if stage in ("tokenizer", "assemble"):
        train_tokenizer(model, folder=work, seed=SEED)
        check_tokenizer(model)
    if stage in ("policy", "assemble"):
        train_policy(
            model,
            processor,
            clean_steps=CLEAN_STEPS,
            careless_steps=CARELESS_STEPS,
            careless_rate=CARELESS_RATE,
            folder=work,
            seed=SEED,
        )
    if stage in ("detector", "assemble"):
        detector = build_detector(seed=SEED)
        train_detector(detector, steps=DETECTOR_STEPS, folder=work, seed=SEED)
        detector.bfloat16().save_pretrained(work / "detector")
    if stage == "assemble":
        model.eval().requires_grad_(False).bfloat16().save_pretrained(work / "janus")
        processor.save_pretrained(work / "janus")


if __name__ == "__main__":
    main()
