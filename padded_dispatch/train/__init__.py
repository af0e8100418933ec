"""Train a byte-level Mixture-of-Experts GPT on Python's source, with Megatron-Core.

    command line -> Settings, checked                command, arguments, settings, check
      -> worker processes                            padded_dispatch.utils.launch, or torchrun
      -> in each: device and process groups          world
         -> model, Adam, CUDA graphs                 model, optimizer, graphs
         -> steps, evaluations, capacity, traces     loop, data
         -> figures, progress, results files         metrics, display, rows
         -> checkpoints                              checkpoint, integrity

`compare` and `sweep` are two more commands, which train several runs in the same processes.

A laptop runs the same code as GPUs, but for the device (`world`), the optimizer and the layer spec
(`model`).
"""
