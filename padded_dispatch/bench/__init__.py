"""The layer benchmark: one MoE layer of Megatron-Core, forward and backward, ours beside stock.

    flags -> cases, and how to measure them                cases, command
      -> workers: process groups, case by case             command
         -> a layer with the case's dispatcher and routing layer
         -> milliseconds, memory, kernels                  measure
      -> a results file, row by row, and a table           command, report

All contenders of a run share one process group, one set of batches and one loop. Every iteration
copies fresh tokens and a fresh routing into static inputs, the same for all contenders, and starts
without parameter gradients.
"""
