"""What two processes learn from tokens drawn at random, and what they leave behind.

Started by test_deepspeed.py, a process a rank: zero_processes.py FOLDER RESUMED [OVERRIDE ...].
FOLDER gets the checkpoint of the main process and its figures; RESUMED is such a folder, or `-`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from glm_grpo.build import build_policy, build_prompt_set, model_path
from glm_grpo.build_trainer import Launch, build_engine
from glm_grpo.config import compose_config
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.model_folder import ReservedTokens
from glm_grpo.glm_image.token_grid import token_layout
from glm_grpo.grpo.update import UpdateSettings, update_policy
from glm_grpo.training.engine import make_accelerator
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.optimizer_state import load_optimizer, optimizer_to_tensors
from glm_grpo.training.prompts import part_of_batch
from glm_grpo.training.team import current_team
from glm_grpo.types import Advantages, Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import RewardTable

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
PROMPTS, GROUP, SIDE = 3, 2, 64

LEARNT = torch.tensor([[1.0, -1.0], [0.5, -0.5], [2.0, -2.0]])
FLAT = torch.zeros(PROMPTS, GROUP)
UNREADABLE = LEARNT.clone()
UNREADABLE[-1, -1] = torch.nan

SETTINGS = UpdateSettings(
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.0,
    kl_behaviour_coef=0.0,
    kl_estimator="k3",
    is_kl_in_reward=False,
    max_grad_norm=0.5,
    micro_batch_size=1,
    updates_per_rollout=1,
)


def draw(config, policy, rows, number, advantages):
    """These rows of a batch: tokens at random, scored by the present policy."""
    source = build_prompt_set("tiny:train", config, ReservedTokens())
    num_tokens = token_layout(SIDE, SIDE).num_tokens
    generator = torch.Generator().manual_seed(number)
    shape = (PROMPTS, GROUP, num_tokens)
    token_ids = torch.randint(policy.codebook_size, shape, generator=generator)
    prompts = tuple(source[index] for index in range(PROMPTS))
    batch = PromptBatch(prompts, GROUP, SIDE, SIDE, seed=0, decode_seeds=(0,) * PROMPTS)
    own, count = slice(rows.start, rows.stop), len(rows)
    experience = Experience(
        prompts=part_of_batch(batch, rows),
        rollout=Rollout(token_ids[own], torch.zeros(shape)[own], None, policy_step=0),
        images=ImageBatch(torch.zeros(count, GROUP, 3, 1, 1, dtype=torch.uint8), (0,) * count),
        rewards=RewardTable(
            names=("only",),
            raw=advantages[own, :, None],
            is_applicable=torch.ones(count, 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=advantages[own],
        penalties=torch.zeros(count, GROUP),
        advantages=Advantages(advantages[own], torch.zeros(count, dtype=torch.bool)),
    )
    with torch.no_grad():
        log_probs = policy.replay(experience, torch.arange(count * GROUP)).log_probs
    rollout = replace(experience.rollout, log_probs=log_probs.view(count, GROUP, num_tokens))
    return replace(experience, rollout=rollout)


def start() -> Accelerator:
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        import deepspeed  # noqa: PLC0415

        # It would compile a way of talking through shared memory, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Where there is no accelerator, accelerate does not name it a backend.
        PartialState(backend="gloo")
    return make_accelerator()


def main(folder: Path, resumed: str, *overrides: str) -> None:
    accelerator, team = start(), current_team()
    config = compose_config(CONFIG_DIR, "tiny", [f"run_dir={folder}", *overrides])
    pipeline = load_pipeline(model_path("tiny"), dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=False)
    plan = [LEARNT, FLAT, LEARNT, UNREADABLE, LEARNT]
    if resumed != "-":
        plan = [LEARNT]
        policy.load_state_tensors(load_file(f"{resumed}/policy.safetensors"))
    engine = build_engine(policy, Launch(accelerator, team))
    optimizer = engine.prepare(AdamW(policy.trainable_parameters(), weight_decay=0.1))
    learning_rate = LearningRate(
        optimizer, peak=1e-3, schedule="constant", warmup_updates=4, total_updates=100
    )
    if resumed != "-":
        values = json.loads(Path(resumed, "optimizer.json").read_text())
        load_optimizer(optimizer, load_file(f"{resumed}/optimizer.safetensors"), values)
        learning_rate.set(5)
    reports, stepped = [], []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(len(reports)))
    rows = team.part(PROMPTS)
    for number, advantages in enumerate(plan, start=learning_rate.updates):
        with engine.whole_weights():
            experience = draw(config, policy, rows, number, advantages)
        reports += update_policy(policy, optimizer, learning_rate, experience, SETTINGS, engine)
    moments, values = optimizer_to_tensors(optimizer)
    tensors = {"policy": engine.policy_tensors(), "optimizer": engine.whole(moments)}
    if team.is_main:
        for name, group in tensors.items():
            save_file(group, folder / f"{name}.safetensors")
        (folder / "optimizer.json").write_text(json.dumps(values))
        figures = {"reports": [asdict(report) for report in reports], "stepped": stepped}
        (folder / "figures.json").write_text(json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
