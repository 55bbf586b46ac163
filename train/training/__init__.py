"""Training: the step, the loop, run folders, checkpoints, metrics, processes."""
