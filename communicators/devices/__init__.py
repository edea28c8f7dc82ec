"""Where arrays live, in host memory or on a GPU, and what the engine does with them."""
