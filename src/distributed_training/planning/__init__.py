"""Will it fit, how fast will it be, what will it cost: predictions for other strategies and numbers of GPUs."""
