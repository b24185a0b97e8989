"""Janus-Pro: a Llama that draws 576 tokens under guidance, and a VQ decoder of them."""
