"""A step that is paid for what EasyOCR reads with its published weights."""

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_evaluation, read_metrics


def test_a_run_learns_from_what_easyocr_reads(easyocr_weights, make_trainer):
    trainer, _, run_dir = make_trainer(
        "train.steps=1",
        "rollout.prompts_per_step=1",
        "decode.steps=4",
        "reward.terms.ocr.engine=easyocr",
        *(f"~reward.terms.{name}" for name in ("lpips", "ssim", "aesthetic")),
    )
    trainer.run()
    row = read_metrics(RunFolder(run_dir))[-1]
    assert 0 < row["reward/ocr/mean"] < 1
    assert row["optim/grad_norm"] > 0
    readings = read_evaluation(RunFolder(run_dir), 1)["note/ocr"].to_pylist()
    assert any(readings), readings
