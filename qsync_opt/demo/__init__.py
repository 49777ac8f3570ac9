"""The demonstration: from a model and this machine's devices to a trained model and a report."""
