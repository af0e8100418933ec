"""Custom ops: an op and its arithmetic together, one idea a module, twins of `kernels`."""
