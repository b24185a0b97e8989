"""Target images as examples, with a policy that says what it was asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm_grpo.config.sections import SftSection
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import find_model
from glm_grpo.models.offload import Offload
from glm_grpo.setup.rewards import check_targets
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.training.targets import sft_weight, tokenize_targets
from glm_grpo.types import PromptBatch, TargetTokens
from rewards.score import Scorer, Term
from rewards.terms.ssim import SsimReward
from rewards.types import Prompt
from tests.factories import NoDecoder, NoPolicy, tiny_config
from tests.opened import prompts_of


@pytest.mark.parametrize(
    ("final", "step", "steps", "expected"),
    [
        # Five steps are four equal parts of the way from 0.8 to 0.4.
        (0.4, 1, 5, 0.8),
        (0.4, 2, 5, 0.7),
        (0.4, 5, 5, 0.4),
        (2.0, 3, 5, 1.4),
        (None, 5, 5, 0.8),
        # A run of one step has no way to go.
        (0.4, 1, 1, 0.8),
    ],
)
def test_sft_weight_goes_from_first_to_last_in_equal_steps(
    final: float | None, step: int, steps: int, expected: float
) -> None:
    settings = SftSection(weight=0.8, final_weight=final)
    assert sft_weight(settings, step, steps) == pytest.approx(expected)


class Tokenizer(NoPolicy):
    """One token each for preview and target: whether there is a preview, and the image's mean."""

    def tokenize_images(self, pixels, *, num_sources=0, preview="zeros"):
        self.preview = preview
        grey = pixels.float().mean(dim=(1, 2, 3)).long()
        return torch.stack([torch.full_like(grey, int(num_sources == 0)), grey], dim=1)

    def tokens_per_image(self, batch):
        return 2 if batch.num_sources == 0 else 1


def make_examples(*greys: int | None, sources: int = 0) -> tuple[TargetTokens, Tokenizer]:
    """Of prompts with a grey target, or none."""
    image = torch.ones(3, 32, 32, dtype=torch.uint8)
    prompts = tuple(
        Prompt(
            f"grey {grey}",
            "grey",
            target=None if grey is None else grey * image,
            sources=(image,) * sources,
        )
        for grey in greys
    )
    policy = Tokenizer()
    models = Models(
        policy=policy,
        decoder=NoDecoder(),
        scorer=Scorer([Term("ssim", SsimReward(torch.device("cpu")), 1.0)]),
        offload=Offload({}),
    )
    batch = PromptBatch(prompts, 4, 32, 32, seed=0, decode_seeds=tuple(range(len(prompts))))
    return (
        tokenize_targets(models, batch, weight=0.5, preview="repeat", clock=PhaseClock()),
        policy,
    )


def test_examples_are_the_targets_of_the_prompts_that_have_one() -> None:
    examples, policy = make_examples(7, None, 9)
    assert examples.prompt_indices.tolist() == [0, 2]
    assert [prompt.prompt_id for prompt in examples.prompts.prompts] == ["grey 7", "grey 9"]
    assert examples.prompts.decode_seeds == (0, 2)
    assert examples.prompts.group_size == 1
    # With a preview, as what is sampled without sources has one.
    assert examples.token_ids.tolist() == [[1, 7], [1, 9]]
    assert examples.weight == 0.5
    assert policy.preview == "repeat"


def test_examples_of_edits_have_no_preview() -> None:
    assert make_examples(7, sources=1)[0].token_ids.tolist() == [[0, 7]]


@pytest.mark.parametrize(("sources", "tokens"), [(0, 2), (1, 1)])
def test_without_any_target_one_image_of_the_right_length_is_replayed(
    sources: int, tokens: int
) -> None:
    examples, _ = make_examples(None, None, sources=sources)
    assert examples.prompt_indices.tolist() == []
    assert [prompt.prompt_id for prompt in examples.prompts.prompts] == ["grey None"]
    assert examples.token_ids.tolist() == [[0] * tokens]


def test_training_prompts_without_any_target_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('the word "OPEN"\nthe word "SHUT"\n')
    few = (f"data.path={path}", f"data.eval_path={path}", "rollout.prompts_per_step=2")
    for learning, said in (
        ("sft.final_weight=0.1", "(?s)sft.weight = 0.0.* 2 .*sft.weight=0"),
        ("train.method=sft", "(?s)train.method = 'sft'.* 2 .*train.method=grpo"),
    ):
        config = tiny_config(learning, *few)
        with pytest.raises(ConfigError, match=said):
            check_targets(config, prompts_of(config))


def test_sizes_at_which_no_target_can_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"a circle, number {index}\n" for index in range(8)))
    long = ("rollout.height=96", "rollout.width=480", f"data.path={path}", f"data.eval_path={path}")
    model = find_model("tiny")
    for learning in ("train.method=sft", "sft.weight=0.1"):
        with pytest.raises(ConfigError, match=r"rollout.width=480.*4 times"):
            model.family.check_sizes(model.path, tiny_config(*long, learning))
    model.family.check_sizes(model.path, tiny_config(*long))
