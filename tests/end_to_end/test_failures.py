"""A term that fails stops the run, and nothing else is lost."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.terminal import explain
from glm_grpo.training.batches import build_batch
from rewards.types import RewardError
from tests.factories import Brightness


class Failing(Brightness):
    """Brightness, but for the last prompt of step 2: of its images only the first is scored.

    Id and images of that prompt are kept in `refused`.
    """

    refused = last = None

    def watch(self, step):
        take = step.take

        def watched(at, *arguments, **options):
            batch = build_batch(step.config, step.prompts, at)
            self.last = batch.prompts[-1].prompt_id if at == 2 else None
            return take(at, *arguments, **options)

        step.take = watched

    def score(self, prompts, pixels):
        if prompts[0].prompt_id == self.last:
            self.refused = self.refused or (self.last, pixels)
            # A group that fails is scored image by image.
            if (pixels == self.refused[1][1]).all(dim=(1, 2, 3)).any():
                raise ConnectionError("the scorer is gone")
        return super().score(prompts, pixels)


def test_a_term_that_fails_leaves_a_checkpoint_and_its_images(make_trainer):
    term = Failing()
    # The images of a group differ.
    small = ("rollout.group_size=2", "rollout.temperature=10", "train.steps=4")
    trainer, _, run_dir = make_trainer(*small, term=term)
    term.watch(trainer.step)
    folder = RunFolder(run_dir)

    with pytest.raises(RewardError) as caught:
        trainer.run()

    prompt_id, pixels = term.refused
    place = run_dir / "failures" / "step-000002"
    message = explain(caught.value)
    assert message.startswith(f"RewardError: term brightness, prompt {prompt_id}, image 1: ")
    assert "ConnectionError: the scorer is gone" in message
    assert message.endswith(f". The images are in {place}")
    stored = [np.asarray(Image.open(path)).tolist() for path in sorted(place.glob("*.png"))]
    assert stored == [image.permute(1, 2, 0).tolist() for image in pixels]
    assert load_checkpoint(newest_checkpoint(folder)).step == 1
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert folder.gallery_path.is_file()
