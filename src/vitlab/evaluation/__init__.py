"""Sec. 4.1: accuracy, predictions, features, few-shot and linear-probe evaluation."""
