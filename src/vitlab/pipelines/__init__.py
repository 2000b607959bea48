"""Sec. 4.1-4.2: from a configuration to a tested model: pre-training, fine-tuning, VTAB."""
