"""A run from its config to its result (Sec. 4.1-4.2): pre-training, VTAB, and what fine-tuning builds on."""
