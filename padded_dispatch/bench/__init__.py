"""The layer benchmark: one MoE layer of Megatron-Core, forward and backward, ours beside stock.

    command line -> Settings: cases and how to measure      command, cases
      -> workers                                            utils.launch, or torchrun
      -> each: process groups, case by case                 work
         -> a layer with the case's dispatcher and routing  layer
         -> milliseconds, memory, kernels by phase          measure
         -> the least time that the hardware allows         roofline
      -> a results file, row by row, and a table            work, table
    results file -> time model of `padded-dispatch tune`    calibrate
    kernels and experts by themselves, on one device        parts

All contenders of a run share one process group, one set of batches and one loop. Every iteration
copies fresh tokens and a fresh routing into static inputs, the same for all contenders, and starts
without parameter gradients.
"""
