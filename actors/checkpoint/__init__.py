"""What a checkpoint's files say beside its weights: adapters, generation defaults, pooling."""
