"""The main job: train a byte-level Mixture-of-Experts GPT on Python's own source, with Megatron.

    command line -> Settings, checked once            arguments, settings, presets
      -> workers                                      padded_dispatch.utils.launch, or torchrun
      -> each: device and process groups              world
         -> model, Adam                               model, optimizer
         -> loop: passes, steps, evaluations          loop, passes, data
         -> capacity: what is dropped, and then done  capacity, skew
         -> figures, progress, files                  metrics, flops, display
         -> checkpoints                               checkpoint

Everything but the device's own part (`world`, `optimizer`, the spec in `model`) is the same on a
laptop and on GPUs.
"""
