"""Train the embedded model from scratch: `python -m tools.tiny.pretrain --work FOLDER`.

Stages, each resumable and with fixed seeds: tokenizer (vision tower and VQ), vae, decoder (DiT and
glyph encoder), policy (language model), quality (CLIP and quality head), assemble. `--stage` runs
only one stage and those it needs; once `tokenizer` is done, `decoder` and `policy` can run in
parallel on two cores. Without it all stages run in turn and write FOLDER/pipeline and
FOLDER/quality_clip, which ship as `glm_grpo/tiny/weights/`.
"""

from __future__ import annotations

from pathlib import Path

from diffusers import GlmImagePipeline

from glm_grpo.tiny import models
from tools.tiny.stage import run_stages
from tools.tiny.train_decoder import train_decoder, train_vae
from tools.tiny.train_policy import train_policy
from tools.tiny.train_quality import build_clip, build_head, save_quality, train_quality
from tools.tiny.train_tokenizer import cell_tokens, train_tokenizer

SEED = 20261121
DECODER_STEPS = 4000
BLIND_STEPS = 1500
CLEAN_STEPS = 300
CARELESS_STEPS = 600
LETTER_RATE = 0.25
OTHER_RATE = 0.15
EDIT_STEPS = 900
EDIT_LETTER_RATE = 0.12
EDIT_RATE = 0.45

_STAGES = ("tokenizer", "vae", "decoder", "policy", "quality", "assemble")


def main() -> None:
    """Run the command line."""
    run_stages(_STAGES, _run, description=__doc__.splitlines()[0])


def _run(stage: str, work: Path) -> None:
    if stage in ("quality", "assemble"):
        clip, head = build_clip(seed=SEED), build_head(seed=SEED)
        train_quality(clip, head, folder=work, seed=SEED)
        save_quality(clip.eval(), head, work / "quality_clip")
    if stage == "quality":
        return
    processor = models.build_processor()
    model = models.build_policy_model(seed=SEED)
    train_tokenizer(model, processor, folder=work, seed=SEED)
    tokens_of_cells = cell_tokens(model, processor)
    if stage == "tokenizer":
        return
    if stage in ("policy", "assemble"):
        train_policy(
            model,
            processor,
            tokens_of_cells,
            blind_steps=BLIND_STEPS,
            clean_steps=CLEAN_STEPS,
            careless_steps=CARELESS_STEPS,
            letter_rate=LETTER_RATE,
            other_rate=OTHER_RATE,
            edit_steps=EDIT_STEPS,
            edit_letter_rate=EDIT_LETTER_RATE,
            edit_rate=EDIT_RATE,
            folder=work,
            seed=SEED,
        )
    if stage == "policy":
        return
    vae = models.build_vae(seed=SEED)
    train_vae(vae, folder=work, seed=SEED)
    if stage == "vae":
        return
    transformer = models.build_transformer(seed=SEED)
    text_encoder = models.build_text_encoder(seed=SEED)
    train_decoder(
        transformer,
        text_encoder,
        vae,
        models.build_glyph_tokenizer(),
        tokens_of_cells,
        steps=DECODER_STEPS,
        folder=work,
        seed=SEED,
    )
    if stage == "decoder":
        return
    pipeline = GlmImagePipeline(
        tokenizer=models.build_glyph_tokenizer(),
        processor=processor,
        text_encoder=text_encoder.eval(),
        vision_language_encoder=model.eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=models.build_scheduler(),
    )
    pipeline.save_pretrained(work / "pipeline")


if __name__ == "__main__":
    main()
