"""Fig. 12, App. D.5: speed, memory and cost."""
