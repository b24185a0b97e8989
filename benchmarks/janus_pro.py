"""Compare tokens per second of a Janus-Pro rollout with stock `generate`.

python -m benchmarks.janus_pro [--prompts 2] [--group 8] [--repeats 3] [--json FILE]

Both sample the same number of images of 576 tokens for the same prompts, with guidance, by a model
of random weights (8 layers, 512 wide). Stock generation uses a `DynamicCache`, with which it works
on every supported version of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, JanusConfig, JanusForConditionalGeneration

from benchmarks.full_size.janus_pro import encode_ids, policy_on
from benchmarks.full_size.scale import CONFIGS, make_batch
from benchmarks.timing import Labels, Result, compare, in_turns, option_parser, publish, rates
from glm_grpo.config import compose_config

_WIDTH = 512
_SIDE = 384


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args(arguments)
    publish([measure(options.prompts, options.group, options.repeats)], options.json)


def measure(prompts: int, group_size: int, repeats: int) -> Result:
    """Sample `prompts` x `group_size` images both ways."""
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(_sizes()).eval()
    words = ["data.path=none", "data.eval_path=none", "model.adapter=null"]
    policy = policy_on(model, compose_config(CONFIGS, "janus_pro_1b_24gb", words))
    batch = make_batch(_SIDE, prompts=prompts, group_size=group_size)

    def ours() -> None:
        encode_ids(policy, batch)
        policy.sample(batch)

    def stock() -> None:
        inputs = encode_ids(policy, batch)
        with torch.no_grad():
            model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                generation_mode="image",
                do_sample=True,
                top_k=0,
                guidance_scale=5.0,
                num_return_sequences=group_size,
                past_key_values=DynamicCache(),
            )

    seconds = in_turns({"ours": ours, "stock": stock}, repeats=repeats)
    tokens = prompts * group_size * policy.tokens_per_image(batch)
    return compare(
        Labels(
            phase=f"Janus-Pro rollout {prompts} x {group_size}",
            against="stock generate",
            unit="tokens/s",
            command=(
                f"python -m benchmarks.janus_pro --prompts {prompts} --group {group_size} "
                f"--repeats {repeats}"
            ),
        ),
        rates(tokens, seconds["ours"]),
        rates(tokens, seconds["stock"]),
        details={"tokens": tokens},
    )


def _sizes() -> JanusConfig:
    return JanusConfig.from_dict(
        {
            "text_config": {
                "model_type": "llama",
                "vocab_size": 1024,
                "hidden_size": _WIDTH,
                "intermediate_size": 1408,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
            },
            "vision_config": {"num_hidden_layers": 1, "projection_dim": _WIDTH},
            "vq_config": {
                "base_channels": 32,
                "projection_dim": _WIDTH,
                "image_token_embed_dim": _WIDTH,
            },
        }
    )


if __name__ == "__main__":
    main()
