"""Triton kernels and their launchers: tensors and ints in, tensors out.

They need Triton, which comes with torch's CUDA builds, and are imported when an op first meets a
CUDA tensor. With TRITON_INTERPRET=1 they run on a CPU, which is how their logic is tested.
"""
