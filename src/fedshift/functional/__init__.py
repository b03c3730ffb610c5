"""Pure functions of tensors: losses, averages, votes, mixtures, distances. Each names its shapes and its equation."""
