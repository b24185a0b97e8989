"""All that looks at runs: gallery, rescore, compare and probe.

They read what `glm_grpo.run` stores; probe also builds models. Training imports nothing from here:
a program that trains passes it `gallery.refresh_gallery`, which is called after a step is stored.
"""
