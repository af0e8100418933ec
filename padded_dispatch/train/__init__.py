"""Train a byte-level Mixture-of-Experts GPT on Python's source, with Megatron-Core.

    command line -> Settings, checked            command, arguments, settings
      -> worker processes                        padded_dispatch.utils.launch, or torchrun
         -> process groups, steps, evaluation    loop, data
         -> model and optimizer, CUDA graphs     model, padded_dispatch.megatron.graphs
         -> lines of progress, results files     metrics

It is a demo, and the harness that compares dispatchers (`padded-dispatch compare`); Megatron-LM is
the trainer. A laptop runs the same code as GPUs, but for the device, the optimizer and the layer
spec.
"""
