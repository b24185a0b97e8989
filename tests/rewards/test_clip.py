from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
from jaxtyping import Float32, UInt8
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from rewards.terms.clip import ClipImageReward, ClipScoreReward
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
NAME = "clip_test_clip"
MODEL_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
CAPTIONS = ["a red dog", "a blue sign", "a blue sign"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model config, and random weights for it."""
    folder = tmp_path_factory.mktemp("clip")
    config = folder / f"{NAME}.json"
    config.write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        state = open_clip.create_model(NAME).state_dict()
    save_file(state, folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def clip_score(clip_folder: Path) -> ClipScoreReward:
    return ClipScoreReward(**options(clip_folder), device=CPU)


@pytest.fixture(scope="module")
def clip_image(clip_folder: Path) -> ClipImageReward:
    return ClipImageReward(**options(clip_folder), device=CPU)


def options(folder: Path) -> dict[str, str]:
    weights = folder / "weights.safetensors"
    return {"clip_model": str(folder / f"{NAME}.json"), "clip_weights": str(weights)}


def noise(count: int, seed: int = 7) -> UInt8[Tensor, "N 3 40 60"]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 40, 60), generator=generator).to(torch.uint8)


def captioned() -> list[Prompt]:
    return [Prompt(str(index), caption) for index, caption in enumerate(CAPTIONS)]


def embed_pictures(folder: Path, pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, "N 16"]:
    """By open_clip alone."""
    model = open_clip.create_model(NAME, str(folder / "weights.safetensors")).eval()
    transform = image_transform_v2(PreprocessCfg(size=(32, 32)), is_train=False)
    images = [transform(Image.fromarray(part.permute(1, 2, 0).numpy())) for part in pixels]
    with torch.no_grad():
        return torch.cat([model.encode_image(image[None], normalize=True) for image in images])


def embed_captions(folder: Path) -> Float32[Tensor, "3 16"]:
    """By open_clip alone."""
    model = open_clip.create_model(NAME, str(folder / "weights.safetensors")).eval()
    with torch.no_grad():
        return model.encode_text(open_clip.tokenize(CAPTIONS, context_length=8), normalize=True)


def test_clip_score_is_the_cosine_of_prompt_and_picture(
    clip_score: ClipScoreReward, clip_folder: Path
) -> None:
    pixels = noise(3)
    cosines = embed_captions(clip_folder) @ embed_pictures(clip_folder, pixels).T
    scores = clip_score.score(captioned(), pixels)
    torch.testing.assert_close(scores, cosines.diagonal(), rtol=0, atol=1e-5)
    assert len(set(scores.tolist())) == 3


def test_clip_score_rises_as_a_picture_is_drawn_towards_its_prompt(
    clip_score: ClipScoreReward, clip_folder: Path
) -> None:
    # Drawn by gradient through open_clip's model, away from and towards the first caption.
    model = open_clip.create_model(NAME, str(clip_folder / "weights.safetensors")).eval()
    wanted = embed_captions(clip_folder)[0]
    drawn = []
    for direction in (-1, 0, 1):
        inputs = torch.zeros(1, 3, 32, 32, requires_grad=True)
        for _ in range(10):
            cosine = (model.encode_image(inputs, normalize=True) @ wanted).sum()
            (gradient,) = torch.autograd.grad(cosine, inputs)
            inputs = (inputs + 0.1 * direction * gradient.sign()).detach().requires_grad_()
        drawn.append((110 + 60 * inputs.detach()[0]).clamp(0, 255).to(torch.uint8))
    scores = clip_score.score([Prompt("0", CAPTIONS[0])] * 3, torch.stack(drawn))
    assert scores[0] < scores[1] < scores[2]


def test_clip_image_is_one_for_the_target_and_the_cosine_for_others(
    clip_image: ClipImageReward, clip_folder: Path
) -> None:
    pixels = noise(3)
    prompts = [Prompt("0", "a", target=pixels[0])] * 3
    embeddings = embed_pictures(clip_folder, pixels)
    scores = clip_image.score(prompts, pixels)
    torch.testing.assert_close(scores, embeddings @ embeddings[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[0], torch.tensor(1.0), rtol=0, atol=1e-6)
    assert (scores[1:] < 0.999).all()


def test_clip_image_falls_with_the_distance_from_the_target(clip_image: ClipImageReward) -> None:
    target, other = noise(2)
    partly = target.clone()
    partly[:, :8] = other[:, :8]
    prompt = Prompt("0", "a", target=target)
    scores = clip_image.score([prompt] * 3, torch.stack([target, partly, 255 - target]))
    assert scores[0] > scores[1] > scores[2]


def test_clip_image_compares_each_picture_with_its_own_target(
    clip_image: ClipImageReward, clip_folder: Path
) -> None:
    pixels, targets = noise(3), noise(2, seed=8)
    first, second = (Prompt(str(i), "a", target=target) for i, target in enumerate(targets))
    scores = clip_image.score([second, first, second], pixels)
    wanted = embed_pictures(clip_folder, targets)[[1, 0, 1]]
    expected = (wanted * embed_pictures(clip_folder, pixels)).sum(dim=-1)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_clip_image_embeds_a_shared_target_once(clip_folder: Path) -> None:
    reward = ClipImageReward(**options(clip_folder), device=CPU)
    rows = []
    reward.modules()[0].register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    reward.score([Prompt("0", "a", target=noise(1)[0])] * 3, noise(3, seed=8))
    assert rows == [1, 3]


def test_clip_terms_score_a_batch_as_one_by_one_and_twice_the_same(
    clip_score: ClipScoreReward, clip_image: ClipImageReward
) -> None:
    pixels, targets = noise(3), noise(3, seed=8)
    prompts = [
        Prompt(prompt.prompt_id, prompt.prompt, target=target)
        for prompt, target in zip(captioned(), targets, strict=True)
    ]
    for reward in (clip_score, clip_image):
        scores = reward.score(prompts, pixels)
        assert scores.dtype == torch.float32
        assert not scores.requires_grad
        assert torch.equal(reward.score(prompts, pixels), scores)
        single = [reward.score(prompts[i : i + 1], pixels[i : i + 1]) for i in range(3)]
        torch.testing.assert_close(torch.cat(single), scores, rtol=0, atol=1e-5)


def test_clip_terms_expose_frozen_networks(
    clip_score: ClipScoreReward, clip_image: ClipImageReward
) -> None:
    both_towers = sum(part.numel() for part in clip_score.modules()[0].parameters())
    image_tower = sum(part.numel() for part in clip_image.modules()[0].parameters())
    assert image_tower < both_towers - 49408 * 32  # the tokens' embedding is not kept
    for reward in (clip_score, clip_image):
        (module,) = reward.modules()
        assert not module.training
        assert not any(weight.requires_grad for weight in module.parameters())


def test_clip_terms_run_where_their_networks_are(clip_folder: Path) -> None:
    prompts = [Prompt("0", "a red dog", target=noise(1)[0])] * 2
    for kind in (ClipScoreReward, ClipImageReward):
        reward = kind(**options(clip_folder), device=CPU)
        for module in reward.modules():
            module.to("meta")
        assert reward.score(prompts, noise(2)).device.type == "meta"


def test_clip_terms_leave_the_global_generator(clip_folder: Path) -> None:
    state = torch.get_rng_state()
    prompts = [Prompt("0", "a red dog", target=noise(1)[0])]
    for kind in (ClipScoreReward, ClipImageReward):
        kind(**options(clip_folder), device=CPU).score(prompts, noise(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_clip_terms_apply_where_they_have_something_to_compare_with(
    clip_score: ClipScoreReward, clip_image: ClipImageReward
) -> None:
    bare, with_target = Prompt("0", "a"), Prompt("1", "a", target=noise(1)[0])
    assert clip_score.applies_to(bare)
    assert not clip_image.applies_to(bare)
    assert clip_image.applies_to(with_target)


def test_clip_image_refuses_targets_of_another_size_and_missing_ones(
    clip_image: ClipImageReward,
) -> None:
    small = Prompt("small", "a", target=torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="target of prompt small is 32 x 32, the picture 60 x 40"):
        clip_image.score([small], noise(1))
    with pytest.raises(ValueError, match="prompt none has no target"):
        clip_image.score([Prompt("none", "a")], noise(1))


@pytest.mark.parametrize(
    ("kind", "name"), [(ClipScoreReward, "clip_score"), (ClipImageReward, "clip_image")]
)
def test_clip_terms_name_their_own_keys_in_errors(
    kind: type[ClipScoreReward | ClipImageReward], name: str, clip_folder: Path, tmp_path: Path
) -> None:
    given = options(clip_folder)
    with pytest.raises(RewardError, match=rf"^{name}\.clip_model 'ViT-XXL' is not"):
        kind(clip_model="ViT-XXL", clip_weights=given["clip_weights"], device=CPU)
    missing = str(tmp_path / "none.pt")
    with pytest.raises(RewardError, match=rf"^{name}\.clip_weights .*none\.pt"):
        kind(clip_model=given["clip_model"], clip_weights=missing, device=CPU)


def test_clip_score_names_the_model_that_its_tokenizer_does_not_fit(tmp_path: Path) -> None:
    config = {**MODEL_CONFIG, "text_cfg": {**MODEL_CONFIG["text_cfg"], "vocab_size": 32}}
    path = tmp_path / "clip_test_small.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    open_clip.add_model_config(path)
    with torch.random.fork_rng(devices=[]):
        save_file(open_clip.create_model(path.stem).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(RewardError, match=r"^clip_score\.clip_model .*vocab_size 32"):
        ClipScoreReward(
            clip_model=str(path), clip_weights=str(tmp_path / "w.safetensors"), device=CPU
        )
